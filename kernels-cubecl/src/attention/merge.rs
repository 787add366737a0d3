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
/// part e^(part_lse - l)` and `sum_lse ← l`. Cube `(query, batch)`; each plane takes a head at a time. `sum` is
/// `[seq, batch, heads, value_dim]` without gaps; strides of `part` in elements.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn merge_kernel<E: Float>(
    sum: &mut [f32],
    sum_lse: &mut [f32],
    part: &[E],
    part_lse: &[f32],
    heads: u32,
    statistics_stride: u32,
    by_row: u32,
    by_batch: u32,
    by_head: u32,
    #[comptime] value_dim: usize,
) {
    let (query, batch) = (CUBE_POS_X, CUBE_POS_Y);
    let lane = UNIT_POS % 32;
    let mut head = UNIT_POS / 32;
    while head < heads {
        let row = ((batch * heads + head) * statistics_stride + query) as usize;
        let (a, b) = (sum_lse[row], part_lse[row]);
        let top = f32::max(a, b);
        let seen = top > UNSEEN;
        // Where neither saw a key both stay zero.
        let base = select(seen, top, 0.0);
        let (x, y) = (ptx::exp2((a - base) * LOG2_E), ptx::exp2((b - base) * LOG2_E));
        let total = x + y;
        let factor = select(seen, ptx::reciprocal(total), 0.0);
        let at = ((query * CUBE_COUNT_Y + batch) * heads + head) * comptime![value_dim as u32] + lane;
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

/// Adds the result of further keys, `part` and `part_lse` as [`forward`](super::forward()) writes them, to `sum` and
/// `sum_lse`, in place: `sum` is fp32 `[queries, batch, heads, value_dim]` without gaps, the log-sum-exps are
/// `[batch, heads, padded_queries]`. A ring starts with zeros and minus infinity, or with its first step's result in fp32.
pub fn merge(
    client: &Client,
    shape: &AttentionShape,
    element: Half,
    (sum, sum_lse): (&Handle, &Handle),
    (part, part_lse): (&Tensor4, &Handle),
) -> Result<(), AttentionError> {
    part.check("part", shape.out_shape())?;
    for (name, lse) in [("sum_lse", sum_lse), ("part_lse", part_lse)] {
        shape.check_statistics(name, lse)?;
    }
    let len = shape.out_shape().iter().product::<usize>();
    let (found, expected) = (sum.size_in_used(), 4 * len as u64);
    if found < expected {
        return Err(AttentionError::Buffer { name: "sum", found, expected });
    }
    let launch = match element {
        Half::Bf16 => merge_kernel::launch_unchecked::<bf16>,
        Half::F16 => merge_kernel::launch_unchecked::<f16>,
    };
    let [by_row, by_batch, by_head] = part.strides.map(|stride| stride as u32);
    // SAFETY: every unit stays in the rows of the shape, which all buffers hold.
    unsafe {
        launch(
            client,
            CubeCount::Static(shape.queries as u32, shape.batch as u32, 1),
            CubeDim::new_1d(UNITS),
            flat(sum, len),
            flat(sum_lse, shape.statistics_len()),
            BufferArg::from_raw_parts(part.handle.clone(), part.extent()),
            flat(part_lse, shape.statistics_len()),
            shape.heads as u32,
            shape.padded_queries() as u32,
            by_row,
            by_batch,
            by_head,
            shape.value_dim,
        );
    }
    Ok(())
}
