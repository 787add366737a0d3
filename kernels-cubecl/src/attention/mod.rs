//! Flash attention for Hopper: forward and backward without a matrix of scores in memory.
//!
//! Layout `[seq, batch, heads, head_dim]` with any strides of the first three dimensions; bf16 in and out, fp32 scores,
//! softmax, statistics and sums. Grouped queries: query head `h` reads key head `h / (heads / kv_heads)`.
#![allow(missing_docs, reason = "the launch macros write public items without documentation")]

pub mod delta;
mod error;
pub mod forward;
pub mod key_gradient;
pub mod portable;
mod problem;
pub mod query_gradient;
mod tensor;
pub mod tile;

pub use error::AttentionError;
pub use problem::{AttentionShape, Dropout, Extras, Half, Packed};
pub use tensor::Tensor4;

use crate::hopper::mma::{PANEL, ROWS};
use crate::tiling::{KEY_ROWS, QUERY_ROWS};
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::wgmma::Swizzle;
use forward::ForwardPlan;
use half::bf16;
use key_gradient::KeyGradientPlan;
use query_gradient::QueryGradientPlan;

/// Units of a cube of every kernel here but that of `delta`: two warpgroups.
const UNITS: u32 = 256;

/// A tensor map over `tensor` as `[batch, heads, panels, seq, 64]`, where a panel is 64 columns of a head: a box of
/// `rows` rows and `panels` panels lies in shared memory as a warpgroup MMA reads it.
fn map(tensor: &Tensor4, rows: usize, panels: usize) -> TensorMapArg<Tiled> {
    let ([seq, batch, heads, d], [by_row, by_batch, by_head]) = (tensor.shape, tensor.strides);
    // SAFETY: `Tensor4::check` compared the extent of the tensor with the size of its buffer.
    let arg = unsafe {
        TensorArg::from_raw_parts(
            tensor.handle.clone(),
            [by_batch, by_head, PANEL, by_row, 1].into(),
            [batch, heads, d / PANEL, seq, PANEL].into(),
        )
    };
    let tiles = TiledArgs { tile_size: [1, 1, panels, rows, PANEL].into() };
    TensorMapArg::new(tiles, arg, bf16::elem_type_native()).with_swizzle(Swizzle::B128.into())
}

/// The part of a handle that a kernel takes as a flat fp32 buffer.
fn statistics(handle: &Handle, len: usize) -> BufferArg {
    // SAFETY: `AttentionShape::check_statistics` compared `len` with the size of the buffer.
    unsafe { BufferArg::from_raw_parts(handle.clone(), len) }
}

/// `out = softmax(q kᵀ · scale) v` and the log-sum-exp of the scaled scores, `lse`: fp32
/// `[batch, heads, shape.padded_queries()]`.
pub fn forward(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    extras: &Extras,
    (q, k, v): (&Tensor4, &Tensor4, &Tensor4),
    out: &Tensor4,
    lse: &Handle,
) -> Result<(), AttentionError> {
    let plan = ForwardPlan::fastest(shape.head_dim, shape.causal);
    forward_planned(client, shape, scale, extras, (q, k, v), out, lse, plan)
}

/// [`forward`] with the choices spelled out, for measurements.
#[allow(clippy::too_many_arguments)]
pub fn forward_planned(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    extras: &Extras,
    (q, k, v): (&Tensor4, &Tensor4, &Tensor4),
    out: &Tensor4,
    lse: &Handle,
    plan: ForwardPlan,
) -> Result<(), AttentionError> {
    shape.check(client, extras)?;
    q.check("q", shape.query_shape())?;
    k.check("k", shape.key_shape())?;
    v.check("v", shape.value_shape())?;
    out.check("out", shape.out_shape())?;
    shape.check_statistics("lse", lse)?;
    let (blocks, panels) = (shape.padded_queries() / QUERY_ROWS, shape.head_dim / PANEL);
    // SAFETY: the tensor maps bound every access but those to `lse`, whose rows are padded to whole blocks.
    unsafe {
        forward::forward::launch_unchecked(
            client,
            CubeCount::Static(shape.heads as u32, shape.batch as u32, blocks as u32),
            CubeDim::new_1d(UNITS),
            map(q, ROWS, panels),
            map(k, plan.block, panels),
            map(v, plan.block, panels),
            map(out, 16, 1),
            statistics(lse, shape.statistics_len()),
            shape.queries as u32,
            shape.keys as u32,
            shape.padded_queries() as u32,
            (shape.heads / shape.kv_heads) as u32,
            scale * core::f32::consts::LOG2_E,
            plan,
        );
    }
    Ok(())
}

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
    /// Log-sum-exp, as [`forward`] writes it.
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
#[derive(Clone, Copy, Debug)]
pub struct BackwardPlan {
    /// For the gradient of the queries.
    pub queries: QueryGradientPlan,
    /// For the gradients of the keys and values.
    pub keys: KeyGradientPlan,
}

impl BackwardPlan {
    /// What was fastest on an H200.
    pub fn fastest(head_dim: usize, causal: bool) -> Self {
        Self { queries: QueryGradientPlan::fastest(head_dim, causal), keys: KeyGradientPlan::fastest(head_dim, causal) }
    }
}

/// The gradients of `q`, `k` and `v`, given that of the output. Every sum is taken in one order, so two calls on the same
/// numbers give the same bits. For ring attention `out` and `lse` are those of the whole ring.
pub fn backward(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    extras: &Extras,
    saved: Saved,
    out_gradient: &Tensor4,
    gradients: Gradients,
) -> Result<(), AttentionError> {
    let plan = BackwardPlan::fastest(shape.head_dim, shape.causal);
    let delta = client.empty(4 * shape.statistics_len());
    row_sums(client, shape, extras, saved.out, out_gradient, &delta)?;
    query_gradient(client, shape, scale, extras, saved, out_gradient, &delta, gradients.q, plan.queries)?;
    key_gradient(client, shape, scale, extras, saved, out_gradient, &delta, (gradients.k, gradients.v), plan.keys)
}

/// First step of [`backward`]: `delta = Σ out · out_gradient`, fp32 `[batch, heads, shape.padded_queries()]`.
pub fn row_sums(
    client: &Client,
    shape: &AttentionShape,
    extras: &Extras,
    out: &Tensor4,
    out_gradient: &Tensor4,
    delta: &Handle,
) -> Result<(), AttentionError> {
    shape.check(client, extras)?;
    out.check("out", shape.out_shape())?;
    out_gradient.check("out_gradient", shape.out_shape())?;
    shape.check_statistics("delta", delta)?;
    let flat = |tensor: &Tensor4| {
        // SAFETY: `Tensor4::check` compared the extent of the tensor with the size of its buffer.
        unsafe { BufferArg::from_raw_parts(tensor.handle.clone(), tensor.extent() / 4) }
    };
    let [out_strides, gradient_strides] = [out.strides, out_gradient.strides].map(|s| s.map(|s| (s / 4) as u32));
    // SAFETY: the kernel reads rows that exist and writes the padded rows that `check_statistics` found room for.
    unsafe {
        delta::delta::launch_unchecked(
            client,
            CubeCount::Static(shape.padded_queries() as u32 / delta::ROWS, shape.heads as u32, shape.batch as u32),
            CubeDim::new_1d(32 * delta::ROWS),
            flat(out),
            flat(out_gradient),
            statistics(delta, shape.statistics_len()),
            shape.queries as u32,
            shape.padded_queries() as u32,
            out_strides[0],
            out_strides[1],
            out_strides[2],
            gradient_strides[0],
            gradient_strides[1],
            gradient_strides[2],
            shape.head_dim,
        );
    }
    Ok(())
}

fn check_saved(
    client: &Client,
    shape: &AttentionShape,
    extras: &Extras,
    saved: &Saved,
    out_gradient: &Tensor4,
    delta: &Handle,
) -> Result<(), AttentionError> {
    shape.check(client, extras)?;
    saved.q.check("q", shape.query_shape())?;
    saved.k.check("k", shape.key_shape())?;
    saved.v.check("v", shape.value_shape())?;
    out_gradient.check("out_gradient", shape.out_shape())?;
    shape.check_statistics("lse", saved.lse)?;
    shape.check_statistics("delta", delta)
}

/// Second step of [`backward`]: the gradient of the queries.
#[allow(clippy::too_many_arguments)]
pub fn query_gradient(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    extras: &Extras,
    saved: Saved,
    out_gradient: &Tensor4,
    delta: &Handle,
    gradient: &Tensor4,
    plan: QueryGradientPlan,
) -> Result<(), AttentionError> {
    check_saved(client, shape, extras, &saved, out_gradient, delta)?;
    gradient.check("q_gradient", shape.query_shape())?;
    let (blocks, panels) = (shape.padded_queries() / QUERY_ROWS, shape.head_dim / PANEL);
    // SAFETY: the tensor maps bound every access but those to the statistics, whose rows are padded to whole blocks.
    unsafe {
        query_gradient::query_gradient::launch_unchecked(
            client,
            CubeCount::Static(shape.heads as u32, shape.batch as u32, blocks as u32),
            CubeDim::new_1d(UNITS),
            map(saved.q, ROWS, panels),
            map(saved.k, plan.block, panels),
            map(saved.v, plan.block, panels),
            map(out_gradient, ROWS, panels),
            statistics(saved.lse, shape.statistics_len()),
            statistics(delta, shape.statistics_len()),
            map(gradient, 16, 1),
            shape.queries as u32,
            shape.keys as u32,
            shape.padded_queries() as u32,
            (shape.heads / shape.kv_heads) as u32,
            scale,
            plan,
        );
    }
    Ok(())
}

/// Third step of [`backward`]: the gradients of the keys and values.
#[allow(clippy::too_many_arguments)]
pub fn key_gradient(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    extras: &Extras,
    saved: Saved,
    out_gradient: &Tensor4,
    delta: &Handle,
    (k_gradient, v_gradient): (&Tensor4, &Tensor4),
    plan: KeyGradientPlan,
) -> Result<(), AttentionError> {
    check_saved(client, shape, extras, &saved, out_gradient, delta)?;
    k_gradient.check("k_gradient", shape.key_shape())?;
    v_gradient.check("v_gradient", shape.value_shape())?;
    let (blocks, panels) = (shape.keys.div_ceil(KEY_ROWS), shape.head_dim / PANEL);
    // SAFETY: the tensor maps bound every access but those to the statistics, whose rows are padded to whole blocks.
    unsafe {
        key_gradient::key_gradient::launch_unchecked(
            client,
            CubeCount::Static(shape.kv_heads as u32, shape.batch as u32, blocks as u32),
            CubeDim::new_1d(UNITS),
            map(saved.q, plan.block, panels),
            map(saved.k, ROWS, panels),
            map(saved.v, ROWS, panels),
            map(out_gradient, plan.block, panels),
            statistics(saved.lse, shape.statistics_len()),
            statistics(delta, shape.statistics_len()),
            map(k_gradient, 16, 1),
            map(v_gradient, 16, 1),
            shape.queries as u32,
            shape.keys as u32,
            shape.padded_queries() as u32,
            (shape.heads / shape.kv_heads) as u32,
            scale,
            plan,
        );
    }
    Ok(())
}
