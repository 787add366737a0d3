//! The attention kernels for other GPUs than Hopper: those of plain units, and those of `mma.sync`. In f64, which the
//! tests on CubeCL's cpu runtime compute with, they need CUDA's libdevice and are not compiled here.
use super::{buffer, compile};
use cubecl::prelude::*;
use half::{bf16, f16};
use kernels_cubecl::attention::portable::draw::DrawsCompilationArg;
use kernels_cubecl::attention::portable::sight::{Plan, SizesCompilationArg};
use kernels_cubecl::attention::portable::{forward, key_gradient, mma, query_gradient};

fn settings(units: u32) -> KernelSettings {
    KernelSettings::new(*CubeDim::new_1d(units), ExecutionMode::Unchecked, AddressType::U32)
}

fn tensor() -> TensorCompilationArg {
    TensorCompilationArg { meta: TensorMetaCompilationArg { len: (), rank: () }, buffer: buffer() }
}

fn sizes() -> SizesCompilationArg {
    SizesCompilationArg { queries: (), keys: (), group: (), window: (), sequences: (), first_query: (), statistics: () }
}

fn draws() -> DrawsCompilationArg {
    DrawsCompilationArg {
        seed: (),
        limit: (),
        scale: (),
        first_batch: (),
        first_head: (),
        first_query: (),
        first_key: (),
        heads: (),
        queries: (),
    }
}

fn place() -> mma::PlaceCompilationArg {
    mma::PlaceCompilationArg { by_row: (), by_batch: (), by_head: () }
}

/// Everything at once, and as little as can be.
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
        let kernel = kernel!(
            forward::forward::Forward<bf16, f32>,
            settings(64),
            (t(), t(), t(), t(), b(), b(), b(), sizes(), draws(), scale(elem), plan)
        );
        compile(&format!("{plan:?}"), kernel);
        let kernel = kernel!(
            query_gradient::query_gradient::QueryGradient<f16, f32>,
            settings(64),
            (t(), t(), t(), t(), t(), b(), b(), t(), b(), b(), sizes(), draws(), scale(elem), plan)
        );
        compile(&format!("query gradient of {plan:?}"), kernel);
        let kernel = kernel!(
            key_gradient::key_gradient::KeyGradient<f32, f32>,
            settings(64),
            (t(), t(), t(), t(), b(), b(), t(), t(), b(), b(), sizes(), draws(), scale(elem), plan)
        );
        compile(&format!("key gradient of {plan:?}"), kernel);
    }
}

#[test]
fn matrix_units_compile() {
    let (b, p) = (buffer, place);
    let count = |ptx: &str, form: &str| ptx.matches(&format!("mma.sync.aligned.m16n8k16.row.col.f32.{form}")).count();
    for plan in plans(&[[16, 16], [128, 128], [192, 128]]) {
        let Plan { head_dim, value_dim, .. } = plan;
        let block = mma::forward::block(head_dim, value_dim);
        let kernel = kernel!(
            mma::forward::mma_forward::MmaForward<bf16>,
            settings(128),
            (b(), b(), b(), b(), b(), b(), b(), p(), p(), p(), p(), sizes(), draws(), (), plan)
        );
        let ptx = compile(&format!("{plan:?}"), kernel);
        // Sixteen by eight of the scores, and of the output.
        let products = (block / 8) * (head_dim / 16) + (value_dim / 8) * (block / 16);
        assert_eq!(count(&ptx, "bf16.bf16.f32"), products, "{plan:?}");
        let block = mma::query_gradient::BLOCK;
        let kernel = kernel!(
            mma::query_gradient::mma_query_gradient::MmaQueryGradient<f16>,
            settings(128),
            (b(), b(), b(), b(), b(), b(), b(), b(), b(), p(), p(), p(), p(), p(), sizes(), draws(), (), plan)
        );
        let ptx = compile(&format!("query gradient of {plan:?}"), kernel);
        let products = (block / 8) * (head_dim + value_dim) / 16 + (head_dim / 8) * (block / 16);
        assert_eq!(count(&ptx, "f16.f16.f32"), products, "query gradient of {plan:?}");
        let kernel = kernel!(
            mma::key_gradient::mma_key_gradient::MmaKeyGradient<bf16>,
            settings(128),
            (
                b(),
                b(),
                b(),
                b(),
                b(),
                b(),
                b(),
                b(),
                b(),
                b(),
                p(),
                p(),
                p(),
                p(),
                p(),
                p(),
                sizes(),
                draws(),
                (),
                plan
            )
        );
        let ptx = compile(&format!("key gradient of {plan:?}"), kernel);
        let products = (block / 8) * (head_dim + value_dim) / 16 + ((head_dim + value_dim) / 8) * (block / 16);
        assert_eq!(count(&ptx, "bf16.bf16.f32"), products, "key gradient of {plan:?}");
    }
}
