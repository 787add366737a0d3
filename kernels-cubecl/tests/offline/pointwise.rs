//! The memory-bound kernels: 16 bytes an access, and no spills from a unit's registers.
use super::{buffer as b, registers_only, settings, settings_of};
use cubecl::prelude::BufferCompilationArg;
use cubecl_runtime::kernel::CubeKernel;
use half::{bf16, f16};
use kernels_cubecl::pointwise::embedding;
use kernels_cubecl::pointwise::{
    CubeShape, activation, column_sum, columns, cross_entropy, dropout, gated, head_norms, latent, low_rank,
    low_rank_gradients, low_rank_swiglu, moe, norm, normalize, partial_sums, rope, sinks, small_matrix, split_bf16,
};

pub const GPU: CubeShape = CubeShape::GPU;

pub fn check(what: &str, kernel: impl CubeKernel) {
    let ptx = registers_only(what, kernel);
    assert!(ptx.contains(".v4.") || ptx.contains(".v8."), "{what} has no access of 16 bytes");
}

#[test]
fn rope_compiles() {
    for (half, head) in [(4, 8), (8, 16), (4, 24), (1, 5)] {
        for (target, copies) in [(b(), true), (BufferCompilationArg { inplace: Some(0) }, false)] {
            let kernel = kernel!(rope::rotate::Rotate<bf16>, settings();
                b(), b(), b(), target, (), (), (), (), half, head, copies);
            check(&format!("rope {half} {head} {copies}"), kernel);
        }
    }
}

#[test]
fn latent_keys_compile() {
    use latent::{HeadVectors, join_keys::JoinKeys, split_gradients::SplitGradients};
    for sections in
        [HeadVectors { half: 4, nope_dim: 16, value_dim: 16 }, HeadVectors { half: 3, nope_dim: 1, value_dim: 2 }]
    {
        check("latent keys", kernel!(JoinKeys<bf16>, settings(); b(), b(), b(), b(), b(), (), (), sections));
        let kernel = kernel!(SplitGradients<bf16>, settings(); b(), b(), b(), b(), b(), b(), (), (), sections, GPU);
        check("gradients of latent keys", kernel);
    }
    check("columns", kernel!(columns::copy_columns::CopyColumns<bf16>, settings(); b(), b(), (), (), (), (), (), ()));
}

#[test]
fn low_rank_gemms_compile() {
    use low_rank::{Plan, low_rank::LowRank};
    use low_rank_swiglu::{Way, low_rank_swiglu::LowRankSwiglu};
    let plan = |steps, transposed, ahead| Plan { steps, transposed, ahead };
    for (steps, transposed) in [(1, false), (2, true), (4, false), (4, true)] {
        let plan = plan(steps, transposed, 4);
        check(&format!("{plan:?}"), kernel!(LowRank<bf16>, settings_of(128); b(), b(), b(), (), plan));
    }
    let ways = [(1, false, false, 0), (2, false, true, 0), (2, true, true, 0), (2, true, true, 1), (4, true, false, 2)];
    for (steps, gradient, amax, left) in ways {
        for apart in [false, true] {
            let way = Way { gradient, amax, left, apart };
            let plan = plan(steps, true, 1);
            let kernel = kernel!(LowRankSwiglu<bf16>, settings_of(128);
                b(), b(), b(), b(), b(), b(), b(), b(), (), plan, way);
            check(&format!("{steps} {way:?}"), kernel);
        }
    }
}

#[test]
fn gradients_of_low_rank_gemms_compile() {
    use kernels_cubecl::fp8::Format;
    use low_rank_gradients::{Out, Plan, add_parts::AddParts, low_rank_gradients::LowRankGradients};
    let cast = Out::Cast(Format::E5m2);
    for (steps, blocks, planes, stages, out) in [(1, 2, 8, 3, cast), (1, 1, 4, 3, Out::Amax), (2, 1, 8, 6, Out::None)] {
        let plan = Plan { steps, blocks, planes, stages, out };
        let kernel = kernel!(LowRankGradients<bf16>, settings_of(32 * planes as u32);
            (), b(), b(), b(), b(), b(), b(), b(), (), (), (), plan);
        check(&format!("{plan:?}"), kernel);
    }
    check("sums", kernel!(AddParts<bf16>, settings(); b(), b(), (), (), (), false));
    check("sums added", kernel!(AddParts<f32>, settings(); b(), b(), (), (), (), true));
}

#[test]
fn cross_entropy_compiles() {
    use cross_entropy::{gradient::Gradient, row_maximum::RowMaximum, row_sums::RowSums};
    check("maximum", kernel!(RowMaximum<bf16>, settings(); b(), b(), (), (), GPU));
    for find in [false, true] {
        check("sums", kernel!(RowSums<f16>, settings(); b(), b(), b(), b(), (), (), (), find, GPU));
    }
    for target in [b(), BufferCompilationArg { inplace: Some(0) }] {
        let kernel = kernel!(Gradient<bf16>, settings(); b(), b(), b(), b(), target, (), (), ());
        check("gradient of the logits", kernel);
    }
}

#[test]
fn the_embedding_compiles() {
    use embedding::gradient::sum_buckets::SumBuckets;
    check("gather", kernel!(embedding::gather::Gather, settings(); b(), b(), b(), (), (), (), ()));
    let plan = embedding::Plan { units: 512, side: 128, buckets: 128, in_flight: 4, max_tokens: 8192, run: 8 };
    for (plan, adds) in [
        (plan, true),
        (plan, false),
        (embedding::Plan { in_flight: 3, ..plan }, true),
        (embedding::Plan { units: 256, side: 64, run: 16, ..plan }, true),
    ] {
        let kernel = kernel!(SumBuckets<bf16, f32>, settings_of(plan.units);
            b(), b(), b(), (), (), (), (), 4, 4, adds, plan);
        check(&format!("buckets {} {} run {} {adds}", plan.side, plan.in_flight, plan.run), kernel);
    }
}

const GATINGS: [gated::Gating; 3] = [gated::Gating::Silu, gated::Gating::Gelu, gated::Gating::GeluTanh];

fn clamped() -> gated::Gating {
    gated::Gating::Clamped(gated::Clamp::new(1.702, 7.0))
}

#[test]
fn products_of_halves_compile() {
    use gated::{gated_backward::GatedBackward, gated_forward::GatedForward};
    for gating in GATINGS {
        check(&format!("{gating:?}"), kernel!(GatedForward<bf16>, settings(); b(), b(), (), gating));
        let kernel = kernel!(GatedBackward<bf16>, settings(); b(), b(), b(), (), gating);
        check(&format!("gradient of {gating:?}"), kernel);
    }
}

#[test]
fn moe_kernels_compile() {
    use moe::add_rows::AddRows;
    use moe::biases::{add_bias_products::AddBiasProducts, add_biases::AddBiases};
    use moe::weighted::{weighted_backward::WeightedBackward, weighted_forward::WeightedForward};
    for terms in [1, 2, 8, 10] {
        check(&format!("sums of {terms} rows"), kernel!(AddRows<bf16>, settings(); b(), b(), b(), (), (), 8, terms));
    }
    for (gating, biased) in [(gated::Gating::Silu, false), (clamped(), true)] {
        let kernel = kernel!(WeightedForward<bf16>, settings(); b(), b(), b(), b(), b(), (), (), gating, biased);
        check(&format!("weighted {gating:?}"), kernel);
        let kernel = kernel!(WeightedBackward<bf16>, settings();
            b(), b(), b(), b(), b(), b(), b(), (), (), (), gating, biased, GPU);
        check(&format!("gradient of weighted {gating:?}"), kernel);
    }
    check("biases", kernel!(AddBiases<bf16>, settings(); b(), b(), b(), b(), (), ()));
    check("products with biases", kernel!(AddBiasProducts<bf16>, settings(); b(), b(), b(), b(), (), (), (), GPU));
}

#[test]
fn activations_compile() {
    use activation::{Activation, activate::Activate, activation_gradient::ActivationGradient};
    for kind in [Activation::Gelu, Activation::GeluTanh, Activation::SquaredRelu] {
        check(&format!("{kind:?}"), kernel!(Activate<bf16>, settings(); b(), b(), (), kind));
        let kernel = kernel!(ActivationGradient<bf16>, settings(); b(), b(), b(), (), kind);
        check(&format!("{kind:?} gradient"), kernel);
    }
}

#[test]
fn sinks_compile() {
    use sinks::{Share, add_sinks::AddSinks, sink_terms::SinkTerms};
    check("sinks", kernel!(AddSinks<bf16>, settings(); b(), b(), b(), b(), (), (), (), (), 8));
    let share = Share::of(GPU, 8, 8);
    check("products", kernel!(SinkTerms<bf16>, settings(); b(), b(), b(), b(), b(), (), (), (), (), 8, share));
}

#[test]
fn norms_compile() {
    use norm::{Kind, Plan, backward::norm_backward::NormBackward, forward::norm_forward::NormForward};
    let wide = Plan { units: 256, plane: 32, vectors: 2, side: 2, in_flight: 1, whole: true, cubes: Some(132) };
    let once = Plan { in_flight: 0, cubes: None, ..wide };
    let longest = Plan { units: 512, vectors: 4, side: 1, in_flight: 0, ..wide };
    let odd = Plan { whole: false, ..wide };
    let short = Plan { units: 32, vectors: 1, side: 16, ..wide };
    let heads = Plan { units: 16, vectors: 1, side: 32, in_flight: 3, ..wide };
    let further = Plan { in_flight: 2, ..wide };
    for (name, plan, centred, adds) in [
        ("plus one", wide, false, true),
        ("", wide, false, false),
        ("", wide, true, false),
        ("", wide, false, true),
        ("", wide, true, true),
        ("once", once, false, false),
        ("once", once, true, false),
        ("once", once, true, true),
        ("twice", Plan { in_flight: 1, ..once }, true, false),
        ("longest", longest, false, true),
        ("odd", odd, true, true),
        ("short", short, false, false),
        ("heads", heads, false, false),
        ("heads at once", Plan { cubes: None, ..heads }, false, false),
        ("slender once", Plan { units: 128, vectors: 4, ..once }, true, false),
        ("further", further, false, false),
        ("further", further, true, false),
    ] {
        let kind = Kind { centred, plus_one: name == "plus one" };
        let small = Plan { side: plan.side.div_ceil(2), ..plan };
        let told = format!("{name}{}{}", if centred { " centred" } else { "" }, if adds { " with sum" } else { "" });
        macro_rules! norm {
            ($kernel:ty, $plan:expr) => {{
                let settings = settings_of($plan.units * $plan.side);
                kernel!($kernel, settings; b(), b(), b(), b(), b(), b(), (), (), (), (), kind, adds, $plan)
            }};
        }
        check(&format!("norm {told}"), norm!(NormForward<f16>, small));
        check(&format!("norm gradient {told}"), norm!(NormBackward<bf16>, plan));
    }
}

#[test]
fn norms_of_heads_compile() {
    use head_norms::{Line, gradient::norm_heads_gradients::NormHeadsGradients, norm_heads::NormHeads};
    for (head_dim, plus_one) in [(64, false), (128, false), (128, true)] {
        let line = Line::of(GPU, head_dim);
        check(
            "head norms",
            kernel!(NormHeads<bf16>, settings(); b(), b(), b(), b(), (), (), (), (), (), (), plus_one, line),
        );
        let kernel = kernel!(NormHeadsGradients<bf16>, settings();
            b(), b(), b(), b(), b(), b(), (), (), (), (), (), (), plus_one, line, 2);
        check(&format!("gradients of head norms, head_dim {head_dim}"), kernel);
    }
}

#[test]
fn normalize_rows_compiles() {
    use normalize::{normalize_gradients::NormalizeGradients, normalize_rows::NormalizeRows};
    for (count, softmax) in [(1, true), (4, true), (8, false), (32, true)] {
        let kernel = kernel!(NormalizeRows, settings(); b(), b(), b(), (), (), (), count, softmax, GPU);
        registers_only("normalize rows", kernel);
        let kernel = kernel!(NormalizeGradients, settings(); b(), b(), b(), b(), (), (), count, softmax, GPU);
        registers_only("gradients of normalized rows", kernel);
    }
}

#[test]
fn split_bf16_compiles() {
    check("split bf16", kernel!(split_bf16::split_bf16::SplitBf16, settings(); b(), b(), (), ()));
}

#[test]
fn small_matrices_compile() {
    use small_matrix::{SmallMatrix, multiply_small::MultiplySmall};
    for (rows, columns) in [(2, 4), (4, 2)] {
        let of = SmallMatrix { rows, columns, strides: [columns, 1] };
        let kernel = kernel!(MultiplySmall<bf16, bf16>, settings(); b(), b(), b(), (), of);
        check(&format!("{rows} by {columns}"), kernel);
    }
}

#[test]
fn dropout_compiles() {
    let kernel = kernel!(dropout::drop_out::DropOut<bf16>, settings(); b(), b(), b(), (), (), (), (), ());
    check("dropout", kernel);
}

#[test]
fn partial_sums_compile() {
    for in_flight in [5, 6] {
        let kernel = kernel!(partial_sums::sum_columns::SumColumns, settings(); b(), b(), (), (), in_flight, GPU);
        check(&format!("partial sums {in_flight}"), kernel);
    }
}

#[test]
fn column_sums_compile() {
    let how = column_sum::Slicing { units: 512, side: 4, slices: 1, in_flight: 8 };
    for sums in [column_sum::Sums::Rows, column_sum::Sums::Groups, column_sum::Sums::WeightedGroups] {
        let kernel = kernel!(column_sum::sum_slices::SumSlices<bf16>, settings_of(512);
            b(), b(), b(), b(), (), (), sums, how);
        check(&format!("column sums {sums:?}"), kernel);
    }
}
