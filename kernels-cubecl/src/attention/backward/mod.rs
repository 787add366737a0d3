//! The launches of a backward pass.
mod fused;
mod separate;

pub use fused::launch_dqdkdv;
pub use separate::{launch_dkdv, launch_dq};

use super::dkdv::DkDvPlan;
use super::dq::DqPlan;
use super::dqdkdv::DqDkDvPlan;
use super::{AttentionError, AttentionShape, CallOptions, Tensor4, Variant};
use super::{delta, dq_accum, flat, launch_dropout_keys};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Inputs and outputs of the forward pass that [`backward`] needs.
#[derive(Clone, Copy, Debug)]
pub struct Saved<'a> {
    /// Queries.
    pub q: &'a Tensor4,
    /// Keys.
    pub k: &'a Tensor4,
    /// Values.
    pub v: &'a Tensor4,
    /// Output.
    pub out: &'a Tensor4,
    /// Log-sum-exp, as [`forward`](super::forward()) writes it.
    pub lse: &'a Handle,
}

/// The outputs of [`backward`].
#[derive(Clone, Copy, Debug)]
pub struct Gradients<'a> {
    /// dQ.
    pub dq: &'a Tensor4,
    /// dK.
    pub dk: &'a Tensor4,
    /// dV.
    pub dv: &'a Tensor4,
}

/// The kernels of a deterministic backward pass.
#[derive(Clone, Debug)]
pub struct BackwardPlan {
    /// For dQ.
    pub dq: DqPlan,
    /// For dK and dV: one or two launches.
    pub dkdv: Vec<DkDvPlan>,
}

impl BackwardPlan {
    /// The plan that was fastest on an H200.
    pub fn fastest(variant: Variant) -> Self {
        Self { dq: DqPlan::fastest(variant), dkdv: DkDvPlan::fastest(variant) }
    }
}

/// The softmax statistics that all backward kernels read.
#[derive(Clone, Debug)]
pub struct BackwardStats {
    /// First `-lse · log₂ e`, then `delta = Σ out · dout`; fp32 `[2, batch, heads, padded_queries]`.
    lse_delta: Handle,
    /// Dropout keys, `u32` of the same shape.
    dropout_keys: Option<Handle>,
}

/// dQ, dK and dV from dO. For ring attention `out` and `lse` are those of the whole ring.
///
/// Takes the fused kernel where there is one; the last bits of dQ then differ from call to call.
/// [`CallOptions::deterministic`] prevents that.
pub fn backward(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    options: &CallOptions,
    saved: Saved,
    dout: &Tensor4,
    gradients: Gradients,
) -> Result<(), AttentionError> {
    let variant = Variant::of(shape, options);
    let stats = preprocess(client, shape, options, saved.out, dout, saved.lse)?;
    let is_fused = !options.deterministic && dq_accum::fits(shape, options);
    if let Some(plan) = DqDkDvPlan::fastest(variant).filter(|_| is_fused) {
        return launch_dqdkdv(client, shape, scale, options, saved, dout, &stats, gradients, plan);
    }
    let plan = BackwardPlan::fastest(variant);
    launch_dq(client, shape, scale, options, saved, dout, &stats, gradients.dq, plan.dq)?;
    let dkdv = (gradients.dk, gradients.dv);
    launch_dkdv(client, shape, scale, options, saved, dout, &stats, dkdv, &plan.dkdv)
}

/// First step of [`backward`]: the softmax statistics (`flash_bwd_preprocess` in FlashAttention).
pub fn preprocess(
    client: &Client,
    shape: &AttentionShape,
    options: &CallOptions,
    out: &Tensor4,
    dout: &Tensor4,
    lse: &Handle,
) -> Result<BackwardStats, AttentionError> {
    shape.check(client, options)?;
    out.check("out", shape.out_shape())?;
    dout.check("dout", shape.out_shape())?;
    shape.check_statistics("lse", lse)?;
    let lse_delta = client.empty(2 * 4 * shape.statistics_len());
    let quads = |tensor: &Tensor4| {
        // SAFETY: `Tensor4::check` compared the extent of the tensor with the size of its buffer.
        unsafe { BufferArg::from_raw_parts(tensor.handle.clone(), tensor.extent() / 4) }
    };
    let [by_out, by_gradient] = [out.strides, dout.strides].map(|s| s.map(|s| (s / 4) as u32));
    let blocks = shape.padded_queries() as u32 / delta::ROWS;
    let count = CubeCount::Static(blocks, shape.heads as u32, shape.batch as u32);
    by_half!(options.element, E => {
        // SAFETY: the kernel reads rows that exist and writes the padded rows that `lse_delta` has room for.
        unsafe {
            launch_kernel!(delta::attention_delta<E>, client, count, CubeDim::new_1d(32 * delta::ROWS);
                quads(out), quads(dout), flat(lse, shape.statistics_len()), flat(&lse_delta, 2 * shape.statistics_len());
                shape.queries as u32, shape.padded_queries() as u32, by_out[0], by_out[1], by_out[2],
                by_gradient[0], by_gradient[1], by_gradient[2]; shape.value_dim)
        }
    });
    let dropout_keys = options.dropout.map(|dropout| launch_dropout_keys(client, shape, &dropout));
    Ok(BackwardStats { lse_delta, dropout_keys })
}

fn check_saved(
    client: &Client,
    shape: &AttentionShape,
    options: &CallOptions,
    saved: &Saved,
    dout: &Tensor4,
) -> Result<(), AttentionError> {
    shape.check(client, options)?;
    saved.q.check("q", shape.query_shape())?;
    saved.k.check("k", shape.key_shape())?;
    saved.v.check("v", shape.value_shape())?;
    dout.check("dout", shape.out_shape())
}
