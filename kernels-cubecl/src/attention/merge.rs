//! Two partial results of attention become one: the steps of a ring.
use super::{AttentionError, AttentionShape, Half, Tensor4, flat};
use crate::hopper::ptx;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

/// Units of a cube.
const UNITS: u32 = 128;
const LOG2_E: f32 = core::f32::consts::LOG2_E;
const LN_2: f32 = core::f32::consts::LN_2;
/// A log-sum-exp below this belongs to a query that saw no key.
const UNSEEN: f32 = -1.0e30;

/// Adds the result `part` of further keys to `sum`: with `l = ln(e^sum_lse + e^part_lse)`, `sum ← sum e^(sum_lse - l) +
/// part e^(part_lse - l)` and `sum_lse ← l`. Cube `(query, batch)`; each plane takes a head at a time. Strides in
/// elements.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn merge_kernel<E: Float>(
    sum: &mut [f32],
    sum_lse: &mut [f32],
    part: &[E],
    part_lse: &[f32],
    heads: u32,
    sum_statistics: u32,
    part_statistics: u32,
    sum_by_row: u32,
    sum_by_batch: u32,
    sum_by_head: u32,
    by_row: u32,
    by_batch: u32,
    by_head: u32,
    #[comptime] value_dim: usize,
) {
    let (query, batch) = (CUBE_POS_X, CUBE_POS_Y);
    let lane = UNIT_POS % 32;
    let mut head = UNIT_POS / 32;
    while head < heads {
        let row = ((batch * heads + head) * sum_statistics + query) as usize;
        let part_row = ((batch * heads + head) * part_statistics + query) as usize;
        let (a, b) = (sum_lse[row], part_lse[part_row]);
        let top = f32::max(a, b);
        let seen = top > UNSEEN;
        // Where neither saw a key both stay zero.
        let base = select(seen, top, 0.0);
        let (x, y) = (ptx::exp2((a - base) * LOG2_E), ptx::exp2((b - base) * LOG2_E));
        let total = x + y;
        let factor = select(seen, ptx::reciprocal(total), 0.0);
        let at = query * sum_by_row + batch * sum_by_batch + head * sum_by_head + lane;
        let from = query * by_row + batch * by_batch + head * by_head + lane;
        #[unroll]
        for i in 0..comptime![value_dim / 32] {
            let here = (at + comptime![(32 * i) as u32]) as usize;
            let there = (from + comptime![(32 * i) as u32]) as usize;
            sum[here] = (sum[here] * x + f32::cast_from(part[there]) * y) * factor;
        }
        // All lanes have read the old value: a plane runs in step up to here.
        sync_plane();
        if lane == 0 {
            sum_lse[row] = select(seen, base + ptx::log2(total) * LN_2, top);
        }
        head += comptime![UNITS / 32];
    }
}

/// Where a ring keeps what the steps so far gave: rows and batches of a longer tensor.
#[derive(Clone, Copy, Debug)]
pub struct Sum<'a> {
    /// Output in fp32 from its first row of the call on.
    pub out: &'a Handle,
    /// Elements of the output from one row, batch and head to the next.
    pub strides: [usize; 3],
    /// Log-sum-exp in fp32, `[batch, heads, statistics]`, from its first row of the call on.
    pub lse: &'a Handle,
    /// Row length of the log-sum-exp.
    pub statistics: usize,
}

/// Adds the result of further keys, `part` and `part_lse` as [`forward`](super::forward()) writes them, to `sum` and
/// `sum_lse`, in place: `sum` is fp32 `[queries, batch, heads, value_dim]` without gaps, the log-sum-exps are
/// `[batch, heads, padded_queries]`. A ring starts with zeros and minus infinity, or with its first step's result in
/// fp32.
pub fn merge(
    client: &Client,
    shape: &AttentionShape,
    element: Half,
    (sum, sum_lse): (&Handle, &Handle),
    (part, part_lse): (&Tensor4, &Handle),
) -> Result<(), AttentionError> {
    let AttentionShape { batch, heads, value_dim, .. } = *shape;
    let strides = [batch * heads * value_dim, heads * value_dim, value_dim];
    let sum = Sum { out: sum, strides, lse: sum_lse, statistics: shape.padded_queries() };
    merge_rows(client, shape, element, sum, (part, part_lse, shape.padded_queries()))
}

/// [`merge`] into some rows and batches of a longer result: those of `shape`. The row length of `part_lse` is given.
///
/// # Errors
/// If the sizes do not fit the buffers, or the value length is no multiple of 32.
pub fn merge_rows(
    client: &Client,
    shape: &AttentionShape,
    element: Half,
    sum: Sum,
    (part, part_lse, part_statistics): (&Tensor4, &Handle, usize),
) -> Result<(), AttentionError> {
    let AttentionShape { batch, heads, queries, value_dim, head_dim, .. } = *shape;
    part.check("part", shape.out_shape())?;
    if !value_dim.is_multiple_of(32) {
        return Err(AttentionError::HeadDim { head_dim, value_dim });
    }
    let [by_row, by_batch, by_head] = sum.strides;
    let len = (queries - 1) * by_row + (batch - 1) * by_batch + (heads - 1) * by_head + value_dim;
    let statistics = |row: usize| (batch * heads - 1) * row + queries;
    let (sum_len, part_len) = (statistics(sum.statistics), statistics(part_statistics));
    let buffers = [("sum", sum.out, len), ("sum_lse", sum.lse, sum_len), ("part_lse", part_lse, part_len)];
    for (name, handle, len) in buffers {
        let (found, expected) = (handle.size_in_used(), 4 * len as u64);
        if found < expected {
            return Err(AttentionError::Buffer { name, found, expected });
        }
    }
    let launch = match element {
        Half::Bf16 => merge_kernel::launch_unchecked::<bf16>,
        Half::F16 => merge_kernel::launch_unchecked::<f16>,
    };
    let part_strides = part.strides.map(|stride| stride as u32);
    // SAFETY: every unit stays in the rows of the shape, which all buffers hold.
    unsafe {
        launch(
            client,
            CubeCount::Static(queries as u32, batch as u32, 1),
            CubeDim::new_1d(UNITS),
            flat(sum.out, len),
            flat(sum.lse, sum_len),
            BufferArg::from_raw_parts(part.handle.clone(), part.extent()),
            flat(part_lse, part_len),
            heads as u32,
            sum.statistics as u32,
            part_statistics as u32,
            by_row as u32,
            by_batch as u32,
            by_head as u32,
            part_strides[0],
            part_strides[1],
            part_strides[2],
            value_dim,
        );
    }
    Ok(())
}
