//! Flash attention for Hopper: forward and backward without a matrix of scores in memory.
//!
//! Layout `[seq, batch, heads, head_dim]` with any strides of the first three dimensions; bf16 in and out, fp32 scores,
//! softmax, statistics and sums. Grouped queries: query head `h` reads key head `h / (heads / kv_heads)`.

pub mod delta;
pub mod forward;
pub mod key_gradient;
pub mod query_gradient;
pub mod tile;
mod problem;

pub use problem::{AttentionError, AttentionShape, Tensor4};

use crate::hopper::mma::{PANEL, ROWS};
use crate::tiling::QUERY_ROWS;
use cubecl::prelude::*;
use cubecl::wgmma::Swizzle;
use forward::ForwardPlan;
use half::bf16;

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
fn statistics(handle: &cubecl::server::Handle, len: usize) -> BufferArg {
    // SAFETY: `AttentionShape::check_statistics` compared `len` with the size of the buffer.
    unsafe { BufferArg::from_raw_parts(handle.clone(), len) }
}

/// `out = softmax(q kᵀ · scale) v` and the log-sum-exp of the scaled scores, `lse`: fp32
/// `[batch, heads, shape.padded_queries()]`.
pub fn forward(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    (q, k, v): (&Tensor4, &Tensor4, &Tensor4),
    out: &Tensor4,
    lse: &cubecl::server::Handle,
) -> Result<(), AttentionError> {
    let plan = ForwardPlan::fastest(shape.head_dim, shape.causal);
    forward_planned(client, shape, scale, (q, k, v), out, lse, plan)
}

/// [`forward`] with the choices spelled out, for measurements.
pub fn forward_planned(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    (q, k, v): (&Tensor4, &Tensor4, &Tensor4),
    out: &Tensor4,
    lse: &cubecl::server::Handle,
    plan: ForwardPlan,
) -> Result<(), AttentionError> {
    shape.check(client)?;
    for (name, tensor) in [("q", q), ("out", out)] {
        tensor.check(name, shape.query_shape())?;
    }
    for (name, tensor) in [("k", k), ("v", v)] {
        tensor.check(name, shape.key_shape())?;
    }
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
