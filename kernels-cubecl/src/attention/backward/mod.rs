//! The launches of a backward pass.
mod joint;
mod separate;

pub use joint::joint_gradients;
pub use separate::{key_gradients, query_gradients};

use super::joint_gradient::JointGradientPlan;
use super::key_gradient::KeyGradientPlan;
use super::query_gradient::QueryGradientPlan;
use super::{AttentionError, AttentionShape, Extras, Tensor4, Variant};
use super::{delta, drop_keys, flat, joint_sum};
use crate::hopper::mma::Half;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

/// What the forward pass was given and left behind, for [`backward`].
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

/// Where [`backward`] writes.
#[derive(Clone, Copy, Debug)]
pub struct Gradients<'a> {
    /// Gradient of the queries.
    pub q: &'a Tensor4,
    /// Gradient of the keys.
    pub k: &'a Tensor4,
    /// Gradient of the values.
    pub v: &'a Tensor4,
}

/// The kernels of a backward pass.
#[derive(Clone, Debug)]
pub struct BackwardPlan {
    /// For the gradient of the queries.
    pub queries: QueryGradientPlan,
    /// For the gradients of the keys and values.
    pub keys: Vec<KeyGradientPlan>,
}

impl BackwardPlan {
    /// What was fastest on an H200.
    pub fn fastest(variant: Variant) -> Self {
        Self { queries: QueryGradientPlan::fastest(variant), keys: KeyGradientPlan::fastest(variant) }
    }
}

/// What both kernels of the backward pass read for each query.
#[derive(Clone, Debug)]
pub struct Sums {
    /// Minus the log-sum-exp in powers of two and `Σ out · out_gradient`, fp32 `[2, batch, heads, padded_queries]`.
    sums: Handle,
    /// Keys of dropout, `u32` of the same shape.
    drop_keys: Option<Handle>,
}

/// The gradients of `q`, `k` and `v`, given that of the output. For ring attention `out` and `lse` are those of the
/// whole ring.
///
/// Where there is a kernel for all three at once it is taken, and the last bits of the queries' gradients differ from
/// call to call; [`Extras::deterministic`] prevents that.
pub fn backward(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    extras: &Extras,
    saved: Saved,
    out_gradient: &Tensor4,
    gradients: Gradients,
) -> Result<(), AttentionError> {
    let variant = Variant::of(shape, extras);
    let sums = row_sums(client, shape, extras, saved.out, out_gradient, saved.lse)?;
    let joint = !extras.deterministic && joint_sum::fits(shape, extras);
    if let Some(plan) = JointGradientPlan::fastest(variant).filter(|_| joint) {
        return joint_gradients(client, shape, scale, extras, saved, out_gradient, &sums, gradients, plan);
    }
    let plan = BackwardPlan::fastest(variant);
    query_gradients(client, shape, scale, extras, saved, out_gradient, &sums, gradients.q, plan.queries)?;
    let kv = (gradients.k, gradients.v);
    key_gradients(client, shape, scale, extras, saved, out_gradient, &sums, kv, &plan.keys)
}

/// First step of [`backward`]: what it needs of each query.
pub fn row_sums(
    client: &Client,
    shape: &AttentionShape,
    extras: &Extras,
    out: &Tensor4,
    out_gradient: &Tensor4,
    lse: &Handle,
) -> Result<Sums, AttentionError> {
    shape.check(client, extras)?;
    out.check("out", shape.out_shape())?;
    out_gradient.check("out_gradient", shape.out_shape())?;
    shape.check_statistics("lse", lse)?;
    let sums = client.empty(2 * 4 * shape.statistics_len());
    let quads = |tensor: &Tensor4| {
        // SAFETY: `Tensor4::check` compared the extent of the tensor with the size of its buffer.
        unsafe { BufferArg::from_raw_parts(tensor.handle.clone(), tensor.extent() / 4) }
    };
    let [by_out, by_gradient] = [out.strides, out_gradient.strides].map(|s| s.map(|s| (s / 4) as u32));
    let blocks = shape.padded_queries() as u32 / delta::ROWS;
    let launch = match extras.element {
        Half::Bf16 => delta::delta::launch_unchecked::<bf16>,
        Half::F16 => delta::delta::launch_unchecked::<f16>,
    };
    // SAFETY: the kernel reads rows that exist and writes the padded rows that `sums` has room for.
    unsafe {
        launch(
            client,
            CubeCount::Static(blocks, shape.heads as u32, shape.batch as u32),
            CubeDim::new_1d(32 * delta::ROWS),
            quads(out),
            quads(out_gradient),
            flat(lse, shape.statistics_len()),
            flat(&sums, 2 * shape.statistics_len()),
            shape.queries as u32,
            shape.padded_queries() as u32,
            by_out[0],
            by_out[1],
            by_out[2],
            by_gradient[0],
            by_gradient[1],
            by_gradient[2],
            shape.value_dim,
        );
    }
    let drop_keys = extras.dropout.map(|dropout| drop_keys(client, shape, &dropout));
    Ok(Sums { sums, drop_keys })
}

fn check_saved(
    client: &Client,
    shape: &AttentionShape,
    extras: &Extras,
    saved: &Saved,
    out_gradient: &Tensor4,
) -> Result<(), AttentionError> {
    shape.check(client, extras)?;
    saved.q.check("q", shape.query_shape())?;
    saved.k.check("k", shape.key_shape())?;
    saved.v.check("v", shape.value_shape())?;
    out_gradient.check("out_gradient", shape.out_shape())
}
