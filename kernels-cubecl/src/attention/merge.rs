//! Merges two partial results of attention over different keys: the steps of a ring.
use super::{AttentionError, AttentionShape, Half, Tensor4, flat};
use crate::hopper::ptx;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Units of a cube.
const UNITS: u32 = 128;
const LOG2_E: f32 = core::f32::consts::LOG2_E;
const LN_2: f32 = core::f32::consts::LN_2;
/// A log-sum-exp below this belongs to a query without a visible key.
const NO_KEY: f32 = -1.0e30;

/// Merges the result `block_out`, `block_lse` of further keys into `out`, `lse`: with `l = ln(e^lse + e^block_lse)`,
/// `out ← out e^(lse - l) + block_out e^(block_lse - l)` and `lse ← l`. Cube `(query, batch)`; each plane takes a head
/// at a time. Strides in elements.
#[cube(launch_unchecked)]
pub fn merge_kernel<E: Float>(
    out: &mut [f32],
    lse: &mut [f32],
    block_out: &[E],
    block_lse: &[f32],
    heads: u32,
    stats_stride: u32,
    block_stats_stride: u32,
    out_by_row: u32,
    out_by_batch: u32,
    out_by_head: u32,
    block_by_row: u32,
    block_by_batch: u32,
    block_by_head: u32,
    #[comptime] value_dim: usize,
) {
    let (query, batch) = (CUBE_POS_X, CUBE_POS_Y);
    let lane = UNIT_POS % 32;
    let mut head = UNIT_POS / 32;
    while head < heads {
        let row = ((batch * heads + head) * stats_stride + query) as usize;
        let block_row = ((batch * heads + head) * block_stats_stride + query) as usize;
        let (a, b) = (lse[row], block_lse[block_row]);
        let row_max = f32::max(a, b);
        let has_key = row_max > NO_KEY;
        // If the query saw no key in either, both stay zero.
        let base = select(has_key, row_max, 0.0);
        let (x, y) = (ptx::exp2((a - base) * LOG2_E), ptx::exp2((b - base) * LOG2_E));
        let row_sum = x + y;
        let factor = select(has_key, ptx::reciprocal(row_sum), 0.0);
        let at = query * out_by_row + batch * out_by_batch + head * out_by_head + lane;
        let from = query * block_by_row + batch * block_by_batch + head * block_by_head + lane;
        #[unroll]
        for i in 0..comptime![value_dim / 32] {
            let to = (at + comptime![(32 * i) as u32]) as usize;
            let from_index = (from + comptime![(32 * i) as u32]) as usize;
            out[to] = (out[to] * x + f32::cast_from(block_out[from_index]) * y) * factor;
        }
        // All lanes have read the old value: a plane runs in step up to here.
        sync_plane();
        if lane == 0 {
            lse[row] = select(has_key, base + ptx::log2(row_sum) * LN_2, row_max);
        }
        head += comptime![UNITS / 32];
    }
}

/// The running result of a ring: some rows and batches of a longer tensor.
#[derive(Clone, Copy, Debug)]
pub struct MergedOutput<'a> {
    /// Output in fp32, from the first row of the call.
    pub out: &'a Handle,
    /// Elements of the output from one row, batch and head to the next.
    pub strides: [usize; 3],
    /// Log-sum-exp in fp32, `[batch, heads, stats_stride]`, from the first row of the call.
    pub lse: &'a Handle,
    /// Row length of the log-sum-exp.
    pub stats_stride: usize,
}

/// Merges the result of further keys, `block_out` and `block_lse` as [`forward`](super::forward()) writes them, into
/// `out` and `lse`, in place. `out` is fp32 `[queries, batch, heads, value_dim]` without gaps, the log-sum-exps are
/// `[batch, heads, padded_queries]`. A ring starts with zeros and minus infinity, or with its first step's result in
/// fp32.
pub fn merge(
    client: &Client,
    shape: &AttentionShape,
    element: Half,
    (out, lse): (&Handle, &Handle),
    (block_out, block_lse): (&Tensor4, &Handle),
) -> Result<(), AttentionError> {
    let AttentionShape { batch, heads, value_dim, .. } = *shape;
    let strides = [batch * heads * value_dim, heads * value_dim, value_dim];
    let merged = MergedOutput { out, strides, lse, stats_stride: shape.padded_queries() };
    merge_into(client, shape, element, merged, (block_out, block_lse, shape.padded_queries()))
}

/// [`merge`] into some rows and batches of a longer result: those of `shape`. The row length of `block_lse` is given.
///
/// # Errors
/// If the sizes do not fit the buffers, or `value_dim` is no multiple of 32.
pub fn merge_into(
    client: &Client,
    shape: &AttentionShape,
    element: Half,
    merged: MergedOutput,
    (block_out, block_lse, block_stats_stride): (&Tensor4, &Handle, usize),
) -> Result<(), AttentionError> {
    let AttentionShape { batch, heads, queries, value_dim, head_dim, .. } = *shape;
    block_out.check("block_out", shape.out_shape())?;
    if !value_dim.is_multiple_of(32) {
        return Err(AttentionError::HeadDim { head_dim, value_dim });
    }
    let [by_row, by_batch, by_head] = merged.strides;
    let len = (queries - 1) * by_row + (batch - 1) * by_batch + (heads - 1) * by_head + value_dim;
    let stats_len = |stride: usize| (batch * heads - 1) * stride + queries;
    let (lse_len, block_lse_len) = (stats_len(merged.stats_stride), stats_len(block_stats_stride));
    let buffers = [("out", merged.out, len), ("lse", merged.lse, lse_len), ("block_lse", block_lse, block_lse_len)];
    for (name, handle, len) in buffers {
        let (found, expected) = (handle.size_in_used(), 4 * len as u64);
        if found < expected {
            return Err(AttentionError::Buffer { name, found, expected });
        }
    }
    let of_block = block_out.strides.map(|stride| stride as u32);
    by_half!(element, E => {
        // SAFETY: every unit stays in the rows of the shape, which all buffers hold.
        unsafe {
            launch_kernel!(merge_kernel<E>, client, CubeCount::Static(queries as u32, batch as u32, 1),
                CubeDim::new_1d(UNITS);
                flat(merged.out, len), flat(merged.lse, lse_len),
                BufferArg::from_raw_parts(block_out.handle.clone(), block_out.extent()), flat(block_lse, block_lse_len);
                heads as u32, merged.stats_stride as u32, block_stats_stride as u32, by_row as u32, by_batch as u32,
                by_head as u32, of_block[0], of_block[1], of_block[2]; value_dim)
        }
    });
    Ok(())
}
