//! The attention kernels for other GPUs than Hopper: those without matrix units, and those of `mma.sync`. In f64, which the
//! tests on CubeCL's cpu runtime compute with, they need CUDA's libdevice and are not compiled here.
use super::{buffer, compile, settings_of as settings};
use cubecl::prelude::*;
use half::{bf16, f16};
use kernels_cubecl::attention::portable::dropout::DropoutParamsCompilationArg;
use kernels_cubecl::attention::portable::mask::{Plan, SizesCompilationArg};
use kernels_cubecl::attention::portable::{dkdv, dq, forward, mma};

fn tensor() -> TensorCompilationArg {
    TensorCompilationArg { meta: TensorMetaCompilationArg { len: (), rank: () }, buffer: buffer() }
}

fn sizes() -> SizesCompilationArg {
    SizesCompilationArg { queries: (), keys: (), group: (), window: (), sequences: (), first_query: (), statistics: () }
}

fn dropout() -> DropoutParamsCompilationArg {
    DropoutParamsCompilationArg {
        seed: (),
        drop_threshold: (),
        keep_scale: (),
        first_batch: (),
        first_head: (),
        first_query: (),
        first_key: (),
        heads: (),
        queries: (),
    }
}

fn strides() -> mma::StridesCompilationArg {
    mma::StridesCompilationArg { by_row: (), by_batch: (), by_head: () }
}

/// All options, and none.
fn plans(sizes: &[[usize; 2]]) -> Vec<Plan> {
    let both = |&[head_dim, value_dim]: &[usize; 2]| {
        [false, true].map(|all| Plan { head_dim, value_dim, causal: !all, windowed: all, packed: all, dropout: all })
    };
    sizes.iter().flat_map(both).collect()
}

#[test]
fn plain_units_compile() {
    let (b, t) = (buffer, tensor);
    let scale = |elem| InputScalarCompilationArg::new(elem);
    for plan in plans(&[[6, 6], [192, 128]]) {
        let elem = f32::elem_type_native();
        let kernel = kernel!(forward::portable_forward::PortableForward<bf16, f32>, settings(64);
            t(), t(), t(), t(), b(), b(), b(), sizes(), dropout(), scale(elem), plan);
        compile(&format!("{plan:?}"), kernel);
        let kernel = kernel!(dq::portable_dq::PortableDq<f16, f32>, settings(64);
            t(), t(), t(), t(), t(), b(), b(), t(), b(), b(), sizes(), dropout(), scale(elem), plan);
        compile(&format!("dQ of {plan:?}"), kernel);
        let kernel = kernel!(dkdv::portable_dkdv::PortableDkdv<f32, f32>, settings(64);
            t(), t(), t(), t(), b(), b(), t(), t(), b(), b(), sizes(), dropout(), scale(elem), plan);
        compile(&format!("dK and dV of {plan:?}"), kernel);
    }
}

#[test]
fn matrix_units_compile() {
    let (b, p) = (buffer, strides);
    let count = |ptx: &str, form: &str| ptx.matches(&format!("mma.sync.aligned.m16n8k16.row.col.f32.{form}")).count();
    for plan in plans(&[[16, 16], [128, 128], [192, 128]]) {
        let Plan { head_dim, value_dim, .. } = plan;
        let block = mma::forward::block(head_dim, value_dim);
        let kernel = kernel!(mma::forward::mma_forward::MmaForward<bf16>, settings(128);
            b(), b(), b(), b(), b(), b(), b(), p(), p(), p(), p(), sizes(), dropout(), (), plan);
        let ptx = compile(&format!("{plan:?}"), kernel);
        // MMAs of 16 × 8: those of the scores, and those of the output.
        let gemms = (block / 8) * (head_dim / 16) + (value_dim / 8) * (block / 16);
        assert_eq!(count(&ptx, "bf16.bf16.f32"), gemms, "{plan:?}");
        let block = mma::dq::BLOCK;
        let kernel = kernel!(mma::dq::mma_dq::MmaDq<f16>, settings(128);
            b(), b(), b(), b(), b(), b(), b(), b(), b(), p(), p(), p(), p(), p(), sizes(), dropout(), (), plan);
        let ptx = compile(&format!("dQ of {plan:?}"), kernel);
        let gemms = (block / 8) * (head_dim + value_dim) / 16 + (head_dim / 8) * (block / 16);
        assert_eq!(count(&ptx, "f16.f16.f32"), gemms, "dQ of {plan:?}");
        let kernel = kernel!(mma::dkdv::mma_dkdv::MmaDkdv<bf16>, settings(128);
            b(), b(), b(), b(), b(), b(), b(), b(), b(), b(), p(), p(), p(), p(), p(), p(), sizes(), dropout(), (),
            plan);
        let ptx = compile(&format!("dK and dV of {plan:?}"), kernel);
        let gemms = (block / 8) * (head_dim + value_dim) / 16 + ((head_dim + value_dim) / 8) * (block / 16);
        assert_eq!(count(&ptx, "bf16.bf16.f32"), gemms, "dK and dV of {plan:?}");
    }
}
