//! The attention kernels.
use super::{buffer, compile, settings};
use cubecl_runtime::kernel::CubeKernel;
use half::{bf16, f16};
use kernels_cubecl::attention::dkdv::{self, DkDvOutputs, DkDvPlan};
use kernels_cubecl::attention::dq::{self, DqPlan};
use kernels_cubecl::attention::dqdkdv::{self, DqDkDvPlan};
use kernels_cubecl::attention::forward::{self, ForwardPlan};
use kernels_cubecl::attention::masks::BitRowsCompilationArg;
use kernels_cubecl::attention::variant::SizesCompilationArg;
use kernels_cubecl::attention::{Half, Variant, delta, dropout, merge};

/// Every kernel with warpgroup MMAs has as many of them, and nothing that makes ptxas serialise them.
fn check(what: &str, kernel: impl CubeKernel, mmas: usize) {
    let ptx = compile(what, kernel);
    assert_eq!(ptx.matches("wgmma.mma_async").count(), mmas, "warpgroup MMAs of {what}");
    for costly in [".local", "call", "div.rn", "sqrt.rn"] {
        let line = ptx.lines().find(|line| line.trim_start().contains(costly) && !line.contains("//"));
        assert_eq!(line, None, "{what} has an instruction that serialises its MMAs");
    }
}

fn sizes() -> SizesCompilationArg {
    SizesCompilationArg {
        queries: (),
        keys: (),
        offset: (),
        window: (),
        stats_stride: (),
        stats_len: (),
        group: (),
        drop_threshold: (),
        keep_scale: (),
        first_key: (),
    }
}

fn rows() -> BitRowsCompilationArg {
    BitRowsCompilationArg { by_batch: (), by_head: (), by_row: (), last_row: (), last_word: () }
}

/// Those with masks of single scores and weights.
fn masked() -> impl Iterator<Item = Variant> {
    let dims = [64, 128].into_iter().map(|d| Variant::dense(d, d, false));
    dims.flat_map(|plain| {
        let (hidden, kept) = (Variant { hidden: true, ..plain }, Variant { kept: true, ..plain });
        [hidden, kept, Variant { hidden: true, ..kept }]
    })
}

/// All head dimensions, causal and full; for some of them all other options too.
fn variants() -> Vec<Variant> {
    let dims = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)];
    let mut all: Vec<Variant> =
        dims.into_iter().flat_map(|(d, v)| [false, true].map(|causal| Variant::dense(d, v, causal))).collect();
    for plain in [Variant::dense(64, 64, true), Variant::dense(128, 128, true), Variant::dense(128, 128, false)] {
        all.push(Variant { window: true, ..plain });
        all.push(Variant { packed: true, ..plain });
        all.push(Variant { dropout: true, ..plain });
        all.push(Variant { element: Half::F16, ..plain });
    }
    for plain in [Variant::dense(96, 96, true), Variant::dense(192, 128, true), Variant::dense(256, 256, true)] {
        all.push(Variant { window: true, packed: true, dropout: true, element: Half::F16, ..plain });
    }
    all
}

#[test]
fn forward_overlaps_its_gemms() {
    for variant in variants().into_iter().chain(masked()) {
        let plan = ForwardPlan::fastest(variant);
        let kernel = kernel!(forward::attention_forward::AttentionForward, settings();
            (), (), (), (), buffer(), buffer(), buffer(), buffer(), buffer(), buffer(), rows(), rows(), sizes(), (), plan);
        // S and P V of a step. The step is compiled for masked and for unmasked blocks (once with a window), and its parts
        // before and after the loop.
        let copies = if variant.window { 2 } else { 3 };
        check(&format!("{plan:?}"), kernel, copies * (variant.head_dim / 16 + plan.block / 16));
    }
}

#[test]
fn dq_overlaps_its_gemms() {
    for variant in variants() {
        let plan = DqPlan::fastest(variant);
        let kernel = kernel!(dq::attention_dq::AttentionDq, settings();
            (), (), (), (), buffer(), buffer(), buffer(), buffer(), (), sizes(), (), plan);
        let copies = if variant.window || variant.head_dim > 128 { 1 } else { 2 };
        let step = (variant.head_dim + variant.value_dim + plan.block) / 16;
        check(&format!("{plan:?}"), kernel, copies * step);
    }
}

#[test]
fn dkdv_overlaps_its_gemms() {
    for variant in variants() {
        for plan in DkDvPlan::fastest(variant) {
            let kernel = kernel!(dkdv::attention_dkdv::AttentionDkdv, settings();
                (), (), (), (), (), (), buffer(), buffer(), (), (), sizes(), (), plan);
            let dk = (variant.value_dim + plan.block) / 16;
            let dv = plan.block / 16;
            let mmas = match plan.outputs {
                DkDvOutputs::Both => dk + dv,
                DkDvOutputs::Dk => dk,
                DkDvOutputs::Dv => dv,
            };
            check(&format!("{plan:?}"), kernel, variant.head_dim / 16 + mmas);
        }
    }
}

#[test]
fn preprocessing_and_merge_compile() {
    macro_rules! rows {
        ($element:ty, $dim:literal) => {{
            let b = buffer;
            let kernel = kernel!(delta::attention_delta::AttentionDelta<$element>, settings();
                b(), b(), b(), b(), (), (), (), (), (), (), (), (), $dim);
            compile(concat!("delta of ", stringify!($element)), kernel);
            let kernel = kernel!(merge::merge_kernel::MergeKernel<$element>, settings();
                b(), b(), b(), b(), (), (), (), (), (), (), (), (), (), $dim);
            compile(concat!("merge of ", stringify!($element)), kernel);
        }};
    }
    rows!(bf16, 128);
    rows!(f16, 96);
    rows!(bf16, 256);
    let kernel = kernel!(dropout::dropout_keys::DropoutKeys, settings(); buffer(), (), (), (), (), (), (), ());
    let ptx = compile("dropout keys", kernel);
    assert!(ptx.contains("mul.lo.s64"), "64-bit keys are multiplied in 64 bits");
}

#[test]
fn dqdkdv_overlaps_its_gemms() {
    let mut plans: Vec<DqDkDvPlan> = variants().into_iter().filter_map(DqDkDvPlan::fastest).collect();
    assert_eq!(plans.len(), 8 + 5, "head_dim 128 and 64, causal and full: bf16, fp16, with a window, packed");
    let all = [64, 128].map(|d| Variant { window: true, packed: true, ..Variant::dense(d, d, false) });
    plans.extend(all.into_iter().chain(masked()).filter_map(DqDkDvPlan::fastest));
    for plan in plans {
        let kernel = kernel!(dqdkdv::attention_dqdkdv::AttentionDqdkdv, settings();
            (), (), (), (), (), buffer(), buffer(), buffer(), buffer(), buffer(), (), (), rows(), rows(), sizes(), (), plan);
        // S and dP, dV and dK, and dQ; the last dQ is after the loop.
        let mmas = 2 * plan.head_dim() / 16 + 2 * plan.block() / 16 + 2 * 8;
        check(&format!("{plan:?}"), kernel, mmas);
    }
}
