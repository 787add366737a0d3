//! The attention kernels.
use super::{buffer, compile, settings};
use cubecl_runtime::kernel::CubeKernel;
use half::{bf16, f16};
use kernels_cubecl::attention::forward::{self, ForwardPlan};
use kernels_cubecl::attention::joint_gradient::{self, JointGradientPlan};
use kernels_cubecl::attention::key_gradient::{self, Gradient, KeyGradientPlan};
use kernels_cubecl::attention::query_gradient::{self, QueryGradientPlan};
use kernels_cubecl::attention::variant::SizesCompilationArg;
use kernels_cubecl::attention::{Half, Variant, delta, draw, merge};

/// Checks what must hold for every kernel with warpgroup MMAs.
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
        stride: (),
        statistics: (),
        group: (),
        limit: (),
        keep: (),
        first_key: (),
    }
}

/// All head dimensions, causal and full; of two of them everything else too.
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
fn forward_overlaps_its_products() {
    for variant in variants() {
        let plan = ForwardPlan::fastest(variant);
        let kernel = kernel!(
            forward::forward::Forward,
            settings(),
            ((), (), (), (), buffer(), buffer(), buffer(), buffer(), sizes(), (), plan)
        );
        // Scores and values of a step; the step stands there for edge and inner blocks (once with a window), and its
        // parts before and after.
        let copies = if variant.window { 2 } else { 3 };
        check(&format!("{plan:?}"), kernel, copies * (variant.head_dim / 16 + plan.block / 16));
    }
}

#[test]
fn query_gradient_overlaps_its_products() {
    for variant in variants() {
        let plan = QueryGradientPlan::fastest(variant);
        let kernel = kernel!(
            query_gradient::query_gradient::QueryGradient,
            settings(),
            ((), (), (), (), buffer(), buffer(), buffer(), buffer(), (), sizes(), (), plan)
        );
        let copies = if variant.window || variant.head_dim > 128 { 1 } else { 2 };
        let step = (variant.head_dim + variant.value_dim + plan.block) / 16;
        check(&format!("{plan:?}"), kernel, copies * step);
    }
}

#[test]
fn key_gradient_overlaps_its_products() {
    for variant in variants() {
        for plan in KeyGradientPlan::fastest(variant) {
            let kernel = kernel!(
                key_gradient::key_gradient::KeyGradient,
                settings(),
                ((), (), (), (), (), (), buffer(), buffer(), (), (), sizes(), (), plan)
            );
            let keys = (variant.value_dim + plan.block) / 16;
            let values = plan.block / 16;
            let mmas = match plan.gradient {
                Gradient::Both => keys + values,
                Gradient::Keys => keys,
                Gradient::Values => values,
            };
            check(&format!("{plan:?}"), kernel, variant.head_dim / 16 + mmas);
        }
    }
}

#[test]
fn what_goes_around_the_products_compiles() {
    macro_rules! rows {
        ($element:ty, $dim:literal) => {{
            let b = buffer;
            let kernel = kernel!(
                delta::delta::Delta<$element>,
                settings(),
                (b(), b(), b(), b(), (), (), (), (), (), (), (), (), $dim)
            );
            compile(concat!("delta of ", stringify!($element)), kernel);
            let kernel = kernel!(
                merge::merge_kernel::MergeKernel<$element>,
                settings(),
                (b(), b(), b(), b(), (), (), (), (), (), (), (), (), (), $dim)
            );
            compile(concat!("merge of ", stringify!($element)), kernel);
        }};
    }
    rows!(bf16, 128);
    rows!(f16, 96);
    rows!(bf16, 256);
    let kernel = kernel!(draw::drop_keys::DropKeys, settings(), (buffer(), (), (), (), (), (), (), ()));
    let ptx = compile("drop keys", kernel);
    assert!(ptx.contains("mul.lo.s64"), "64-bit keys are multiplied in 64 bits");
}

#[test]
fn joint_gradient_overlaps_its_products() {
    let all = Variant { window: true, packed: true, ..Variant::dense(128, 128, false) };
    let mut plans: Vec<JointGradientPlan> = variants().into_iter().filter_map(JointGradientPlan::fastest).collect();
    assert_eq!(plans.len(), 8, "heads of 128, causal and full: bf16, fp16, with a window, packed");
    plans.extend(JointGradientPlan::fastest(all));
    for plan in plans {
        let kernel = kernel!(
            joint_gradient::joint_gradient::JointGradient,
            settings(),
            ((), (), (), (), (), buffer(), buffer(), buffer(), (), (), sizes(), (), plan)
        );
        // Scores, their gradients, values, keys, and queries; the queries of the last step stand behind the loop.
        check(&format!("{plan:?}"), kernel, 8 + 8 + 4 + 4 + 2 * 8);
    }
}
