//! The memory-bound kernels: 16 bytes an access, and nothing of a unit's outside its registers.
use super::{buffer, compile, hopper, settings, settings_of};
use cubecl_runtime::kernel::CubeKernel;
use half::{bf16, f16};
use kernels_cubecl::pointwise::embedding::{self, gradient, sort};
use kernels_cubecl::pointwise::momentum::MomentumRule;
use kernels_cubecl::pointwise::{
    CubeShape, adamw, column_sum, cross_entropy, dropout, experts, flat, gelu, momentum, muon, norm, rope, swiglu,
};

const GPU: CubeShape = CubeShape::GPU;

fn check(what: &str, kernel: impl CubeKernel) {
    let ptx = compile(what, kernel);
    assert!(ptx.contains(".v4.") || ptx.contains(".v8."), "{what} has no access of 16 bytes");
    let spilled = ptx.lines().find(|line| line.trim_start().starts_with(".local"));
    assert_eq!(spilled, None, "{what} keeps numbers in memory");
}

#[test]
fn rope_compiles() {
    for half in [4, 8] {
        let (b, s) = (buffer, settings());
        let kernel = rope::rotate::Rotate::<bf16>::new(
            s,
            hopper(),
            Default::default(),
            b(),
            b(),
            b(),
            b(),
            (),
            (),
            (),
            (),
            half,
        );
        check("rope", kernel);
    }
}

#[test]
fn cross_entropy_compiles() {
    let b = buffer;
    let device = || (settings(), hopper());
    let (s, d) = device();
    check(
        "maximum",
        cross_entropy::row_maximum::RowMaximum::<bf16>::new(s, d, Default::default(), b(), b(), (), (), GPU),
    );
    for find in [false, true] {
        let (s, d) = device();
        let kernel = cross_entropy::row_sums::RowSums::<f16>::new(
            s,
            d,
            Default::default(),
            b(),
            b(),
            b(),
            b(),
            (),
            (),
            (),
            find,
            GPU,
        );
        check("sums", kernel);
    }
    let in_place = || cubecl::prelude::BufferCompilationArg { inplace: Some(0) };
    for target in [b(), in_place()] {
        let (s, d) = device();
        let kernel = cross_entropy::gradient::Gradient::<bf16>::new(
            s,
            d,
            Default::default(),
            b(),
            b(),
            b(),
            b(),
            target,
            (),
            (),
            (),
        );
        check("gradient of the logits", kernel);
    }
}

#[test]
fn the_embedding_compiles() {
    let b = buffer;
    let (s, d) = (settings(), hopper());
    check("gather", embedding::gather::Gather::new(s, d, Default::default(), b(), b(), b(), (), (), (), ()));
    let (s, d) = (settings(), hopper());
    compile("sorted tiles", sort::sort_tiles::SortTiles::new(s, d, Default::default(), b(), b(), b(), (), GPU));
    let (s, d) = (settings(), hopper());
    compile("merged tiles", sort::merge_tiles::MergeTiles::new(s, d, Default::default(), b(), b(), b(), b(), (), GPU));
    macro_rules! sums {
        ($float:ty, $sum:ty, $add:literal) => {{
            let (s, d) = (settings(), hopper());
            let kernel = gradient::sum_chunks::SumChunks::<$float, $sum>::new(
                s,
                d,
                Default::default(),
                b(),
                b(),
                b(),
                b(),
                b(),
                (),
                (),
                (),
                (),
                $add,
            );
            check("sums", kernel);
            let (s, d) = (settings(), hopper());
            let kernel = gradient::join_chunks::JoinChunks::<$sum>::new(
                s,
                d,
                Default::default(),
                b(),
                b(),
                b(),
                (),
                (),
                (),
                (),
                $add,
                GPU,
            );
            check("joined sums", kernel);
        }};
    }
    sums!(bf16, f32, true);
    sums!(bf16, bf16, false);
    let plan = embedding::Plan { units: 256, side: 32, buckets: 128, ahead: 4, room: 8192 };
    for (plan, adds) in [
        (plan, true),
        (plan, false),
        (embedding::Plan { ahead: 8, ..plan }, true),
        (embedding::Plan { side: 128, buckets: 256, ..plan }, true),
    ] {
        let (s, d, none) = (settings(), hopper(), Default::default());
        type Sums = embedding::buckets::sum_buckets::SumBuckets<bf16, f32>;
        let kernel = Sums::new(s, d, none, b(), b(), b(), (), (), (), (), 4, 4, adds, plan);
        check(&format!("buckets {} {} {adds}", plan.side, plan.ahead), kernel);
    }
}

#[test]
fn swiglu_compiles() {
    let b = buffer;
    let (s, d) = (settings(), hopper());
    check("swiglu", swiglu::swiglu_forward::SwigluForward::<bf16>::new(s, d, Default::default(), b(), b(), ()));
    let (s, d) = (settings(), hopper());
    check(
        "swiglu gradient",
        swiglu::swiglu_backward::SwigluBackward::<bf16>::new(s, d, Default::default(), b(), b(), b(), ()),
    );
}

#[test]
fn experts_compile() {
    let b = buffer;
    let (s, d) = (settings(), hopper());
    let kernel = experts::add_rows::AddRows::<bf16>::new(s, d, Default::default(), b(), b(), b(), (), (), (), 8);
    check("sums of rows", kernel);
    let (s, d) = (settings(), hopper());
    let kernel = experts::weighted_forward::WeightedForward::<bf16>::new(s, d, Default::default(), b(), b(), b(), ());
    check("weighted swiglu", kernel);
    let (s, d) = (settings(), hopper());
    let kernel = experts::weighted_backward::WeightedBackward::<bf16>::new(
        s,
        d,
        Default::default(),
        b(),
        b(),
        b(),
        b(),
        b(),
        (),
        GPU,
    );
    check("weighted swiglu gradient", kernel);
}

/// A few bytes for each token: nothing here wants wide accesses.
#[test]
fn routing_compiles() {
    use experts::choose::{self, Selection};
    use experts::{count, place};
    let b = buffer;
    let device = || (settings(), hopper());
    let no_memory = |what: &str, ptx: String| {
        let spilled = ptx.lines().find(|line| line.trim_start().starts_with(".local"));
        assert_eq!(spilled, None, "{what} keeps numbers in memory");
    };
    let plain = Selection { experts: 128, top_k: 8, groups: 1, top_groups: 1, biased: false };
    for how in [plain, Selection { experts: 256, groups: 8, top_groups: 4, biased: true, ..plain }] {
        let (s, d) = device();
        let (none, args) = (Default::default(), (b(), b(), b()));
        let kernel = choose::choose_experts::ChooseExperts::new(s, d, none, args.0, args.1, args.2, (), (), how, GPU);
        no_memory("choice", compile("choice", kernel));
    }
    let (s, d) = device();
    let kernel = choose::spread_choice::SpreadChoice::new(s, d, Default::default(), b(), b(), (), 128, 8);
    no_memory("mask", compile("mask", kernel));
    let (s, d) = device();
    let kernel = count::count_chunks::CountChunks::new(s, d, Default::default(), b(), b(), (), (), (), 8);
    no_memory("counts", compile("counts", kernel));
    let (s, d) = device();
    let kernel = count::scan_chunks::ScanChunks::new(s, d, Default::default(), b(), b(), (), ());
    no_memory("sums of counts", compile("sums of counts", kernel));
    for parts in [1, 2] {
        let (s, d) = device();
        let kernel = place::place_copies::PlaceCopies::new(
            s,
            d,
            Default::default(),
            b(),
            b(),
            b(),
            b(),
            b(),
            b(),
            b(),
            (),
            (),
            (),
            (),
            (),
            8,
            parts,
        );
        no_memory("places", compile("places", kernel));
    }
    let (s, d) = device();
    let kernel = place::spread_runs::SpreadRuns::new(s, d, Default::default(), b(), b(), (), ());
    no_memory("runs", compile("runs", kernel));
}

#[test]
fn gelu_compiles() {
    let b = buffer;
    for tanh in [false, true] {
        let (s, d) = (settings(), hopper());
        check("gelu", gelu::gelu_forward::GeluForward::<bf16>::new(s, d, Default::default(), b(), b(), (), tanh));
        let (s, d) = (settings(), hopper());
        check(
            "gelu gradient",
            gelu::gelu_backward::GeluBackward::<bf16>::new(s, d, Default::default(), b(), b(), b(), (), tanh),
        );
    }
}

#[test]
fn norms_compile() {
    use norm::Plan;
    let b = buffer;
    let wide = Plan { units: 256, plane: 32, vectors: 2, side: 2, ahead: 1, whole: true, cubes: Some(132) };
    let once = Plan { ahead: 0, cubes: None, ..wide };
    let longest = Plan { units: 512, vectors: 4, side: 1, ahead: 0, ..wide };
    let odd = Plan { whole: false, ..wide };
    let short = Plan { units: 32, vectors: 1, side: 16, ..wide };
    let heads = Plan { units: 16, vectors: 1, side: 32, ahead: 3, ..wide };
    let further = Plan { ahead: 2, ..wide };
    for (name, plan, centred, adds) in [
        ("", wide, false, false),
        ("", wide, true, false),
        ("", wide, false, true),
        ("", wide, true, true),
        ("once", once, false, false),
        ("once", once, true, false),
        ("once", once, true, true),
        ("twice", Plan { ahead: 1, ..once }, true, false),
        ("longest", longest, false, true),
        ("odd", odd, true, true),
        ("short", short, false, false),
        ("heads", heads, false, false),
        ("heads at once", Plan { cubes: None, ..heads }, false, false),
        ("slender once", Plan { units: 128, vectors: 4, ..once }, true, false),
        ("further", further, false, false),
        ("further", further, true, false),
    ] {
        let small = Plan { side: plan.side.div_ceil(2), ..plan };
        let kind = format!("{name}{}{}", if centred { " centred" } else { "" }, if adds { " with sum" } else { "" });
        let (s, d) = (settings_of(small.units * small.side), hopper());
        let kernel = norm::forward::norm_forward::NormForward::<f16>::new(
            s,
            d,
            Default::default(),
            b(),
            b(),
            b(),
            b(),
            b(),
            b(),
            (),
            (),
            (),
            (),
            centred,
            adds,
            small,
        );
        check(&format!("norm {kind}"), kernel);
        let (s, d) = (settings_of(plan.units * plan.side), hopper());
        let kernel = norm::backward::norm_backward::NormBackward::<bf16>::new(
            s,
            d,
            Default::default(),
            b(),
            b(),
            b(),
            b(),
            b(),
            b(),
            (),
            (),
            (),
            (),
            centred,
            adds,
            plan,
        );
        check(&format!("norm gradient {kind}"), kernel);
    }
}

#[test]
fn dropout_compiles() {
    let b = buffer;
    let (s, d) = (settings(), hopper());
    check(
        "dropout",
        dropout::drop_out::DropOut::<bf16>::new(s, d, Default::default(), b(), b(), b(), (), (), (), (), ()),
    );
}

#[test]
fn adamw_compiles_for_all_weights() {
    macro_rules! kernel {
        ($weight:ty, $narrow:literal) => {{
            let b = buffer;
            adamw::adamw_step::AdamwStep::<$weight>::new(
                settings(),
                hopper(),
                Default::default(),
                b(),
                b(),
                b(),
                b(),
                b(),
                b(),
                b(),
                (),
                (),
                (),
                (),
                (),
                (),
                (),
                (),
                (),
                $narrow,
            )
        }};
    }
    check("AdamW, bf16 weights", kernel!(bf16, true));
    check("AdamW, f16 weights", kernel!(f16, true));
    let ptx = compile("AdamW", kernel!(f32, false));
    assert_eq!(ptx.matches("st.global").count(), 3, "masters and moments are written, and nothing else");
}

#[test]
fn flat_writes_and_squares_compile() {
    let b = buffer;
    for adds in [false, true] {
        let (s, d) = (settings(), hopper());
        let kernel = flat::write_run::WriteRun::<bf16, f32>::new(s, d, Default::default(), b(), b(), (), 4, adds);
        check("sum", kernel);
        let (s, d) = (settings(), hopper());
        let kernel = flat::write_run::WriteRun::<f32, bf16>::new(s, d, Default::default(), b(), b(), (), 4, adds);
        check("rounding", kernel);
        let (s, d) = (settings(), hopper());
        let kernel = flat::write_run::WriteRun::<f16, f32>::new(s, d, Default::default(), b(), b(), (), 1, adds);
        compile("sum of single elements", kernel);
    }
    let (s, d) = (settings(), hopper());
    compile("squares", flat::chunk_squares::ChunkSquares::new(s, d, Default::default(), b(), b(), b(), b(), (), GPU));
    let (s, d) = (settings(), hopper());
    compile("copies", flat::copy_chunks::CopyChunks::new(s, d, Default::default(), b(), b(), b(), b(), b()));
}

#[test]
fn column_sums_compile() {
    let b = buffer;
    let (s, d) = (settings_of(512), hopper());
    let how = column_sum::Slicing { units: 512, side: 4, slices: 1, ahead: 8 };
    check(
        "column sums",
        column_sum::sum_slices::SumSlices::<bf16>::new(s, d, Default::default(), b(), b(), (), (), how),
    );
}

#[test]
fn sgd_lion_and_muon_compile() {
    let b = buffer;
    for rule in [MomentumRule::Plain, MomentumRule::Sum, MomentumRule::Nesterov, MomentumRule::Lion] {
        let kernel = momentum::momentum_step::MomentumStep::<bf16>::new(
            settings(),
            hopper(),
            Default::default(),
            b(),
            b(),
            b(),
            b(),
            b(),
            b(),
            (),
            (),
            (),
            (),
            (),
            (),
            (),
            rule,
            true,
        );
        check(&format!("{rule:?}"), kernel);
    }
    let (s, d) = (settings(), hopper());
    check(
        "muon mean",
        muon::mix_gradient::MixGradient::new(s, d, Default::default(), b(), b(), b(), (), (), (), 4, true),
    );
    let (s, d) = (settings(), hopper());
    check("muon step", muon::take_step::TakeStep::new(s, d, Default::default(), b(), b(), (), (), (), 4));
}
