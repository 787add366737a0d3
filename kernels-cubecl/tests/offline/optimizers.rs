//! The optimizers, and what writes and reads their flat buffers: as [`pointwise`](super::pointwise).

use super::pointwise::{GPU, check};
use super::{buffer as b, compile, registers_only, settings};
use half::{bf16, f16};
use kernels_cubecl::pointwise::momentum::MomentumRule;
use kernels_cubecl::pointwise::{adamw, adamw_blocks, flat, momentum, muon, reduce_slices, remainder};

#[test]
fn adamw_compiles_for_all_weights() {
    macro_rules! step {
        ($gradient:ty, $first:ty, $second:ty, $weight:ty, $forms:expr) => {
            kernel!(adamw::adamw_step::AdamwStep<$gradient, $first, $second, $weight>, settings();
                b(), b(), b(), b(), b(), b(), b(), b(), b(), b(), (), (), (), (), (), (), (), (), (), (), $forms)
        };
    }
    let wide = adamw::Forms { narrow: false, split: false, first: false, second: false };
    let narrow = adamw::Forms { narrow: true, ..wide };
    check("AdamW, bf16 weights", step!(f32, f32, f32, bf16, narrow));
    check("AdamW, f16 weights", step!(f32, f32, f32, f16, narrow));
    let split = adamw::Forms { split: true, first: true, second: true, ..wide };
    check("AdamW, 16-bit states", step!(f32, bf16, bf16, bf16, split));
    registers_only("AdamW, 16-bit states and gradients", step!(bf16, bf16, bf16, bf16, split));
    let ptx = compile("AdamW", step!(f32, f32, f32, f32, wide));
    assert_eq!(ptx.matches("st.global").count(), 3, "masters and moments are written, and nothing else");
}

/// A block's numbers stay in registers between its two passes.
#[test]
fn adamw_with_moments_in_8_bits_compiles() {
    macro_rules! step {
        ($gradient:ty, $weight:ty, $narrow:expr, $split:expr) => {
            kernel!(adamw_blocks::adamw_blocks_step::AdamwBlocksStep<$gradient, $weight>, settings();
                b(), b(), b(), b(), b(), b(), b(), b(), b(), b(), b(), b(), (), (), (), (), (), (), (), (), (), $narrow,
                $split, GPU)
        };
    }
    check("AdamW, moments in 8 bits", step!(f32, bf16, true, false));
    registers_only("AdamW, moments in 8 bits, remainders, bf16 gradients", step!(bf16, bf16, false, true));
    registers_only(
        "codes of a moment",
        kernel!(adamw_blocks::encode_blocks::EncodeBlocks, settings(); b(), b(), b(), b(), (), 0),
    );
}

#[test]
fn remainders_compile() {
    use remainder::{join_masters::JoinMasters, split_masters::SplitMasters};
    check("split masters", kernel!(SplitMasters, settings(); b(), b(), b(), ()));
    check("join masters", kernel!(JoinMasters, settings(); b(), b(), b(), ()));
}

#[test]
fn sums_of_slices_compile() {
    for count in [1, 3, 7] {
        let kernel = kernel!(reduce_slices::reduce_slices::ReduceSlices<bf16, f32>, settings();
            b(), b(), b(), (), 8, count);
        check("sum of slices", kernel);
    }
}

#[test]
fn flat_writes_and_squares_compile() {
    use flat::{chunk_squares::ChunkSquares, copy_chunks::CopyChunks, write_run::WriteRun};
    for adds in [false, true] {
        check("sum", kernel!(WriteRun<bf16, f32>, settings(); b(), b(), (), 4, adds));
        check("rounding", kernel!(WriteRun<f32, bf16>, settings(); b(), b(), (), 4, adds));
        compile("sum of single elements", kernel!(WriteRun<f16, f32>, settings(); b(), b(), (), 1, adds));
    }
    compile("squares of bf16", kernel!(ChunkSquares<bf16>, settings(); b(), b(), b(), b(), (), GPU));
    compile("squares", kernel!(ChunkSquares<f32>, settings(); b(), b(), b(), b(), (), GPU));
    for wide in [false, true] {
        let kernel = kernel!(CopyChunks, settings(); b(), b(), b(), b(), b(), b(), b(), wide);
        compile(&format!("copies {wide}"), kernel);
    }
}

#[test]
fn sgd_lion_and_muon_compile() {
    for rule in [MomentumRule::Plain, MomentumRule::Sum, MomentumRule::Nesterov, MomentumRule::Lion] {
        let kernel = kernel!(momentum::momentum_step::MomentumStep<bf16>, settings();
            b(), b(), b(), b(), b(), b(), (), (), (), (), (), (), (), rule, true);
        check(&format!("{rule:?}"), kernel);
    }
    check("muon mean", kernel!(muon::mix_gradient::MixGradient, settings(); b(), b(), b(), (), (), (), 4, true));
    check("muon step", kernel!(muon::take_step::TakeStep, settings(); b(), b(), (), (), (), 4));
}
