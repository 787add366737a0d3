//! The fp32 accumulator of dQ that the fused kernel [`dqdkdv`](super::dqdkdv) adds to by bulk reductions (TMA), and its
//! conversion to dQ.
use super::dqdkdv::block;
use super::variant::bounded;
use super::{AttentionShape, CallOptions};
use crate::hopper::bulk::{self, Quad};
use crate::hopper::{mma::ROWS, ptx};
use cubecl::prelude::*;

/// Quads of a warpgroup's 64 × 64 numbers, half of a q block: eight for each of its units.
pub const DQ_HALF: u32 = (ROWS * ROWS / 4) as u32;

/// Blocks of the accumulator for a head. Those of a packed sequence begin after those of the previous one, and one of
/// them may stay unused.
pub fn blocks_of_head(shape: &AttentionShape, options: &CallOptions) -> usize {
    shape.padded_queries() / block(shape.head_dim) + options.packed.map_or(0, |packed| packed.sequences)
}

/// Numbers in the accumulator, `[batch, heads, blocks, 2, 8, 128]` of four each. One more block takes the zeros of
/// cubes whose keys no query sees.
pub fn len(shape: &AttentionShape, options: &CallOptions) -> usize {
    (shape.batch * shape.heads * blocks_of_head(shape, options) + 1) * 2 * ROWS * ROWS
}

/// Whether packed sequences are long enough to leave less than half of their blocks unused.
pub fn fits(shape: &AttentionShape, options: &CallOptions) -> bool {
    options.packed.is_none_or(|packed| packed.sequences * block(shape.head_dim) <= shape.queries)
}

/// First block of a head for packed sequence `sequence`, which begins at `first_query`.
#[cube]
pub fn first_block(first_query: u32, sequence: u32, #[comptime] block: usize) -> u32 {
    first_query / comptime![block as u32] + sequence
}

/// Barrier of the warpgroup.
#[cube]
pub fn sync_warpgroup() {
    if UNIT_POS < 128 {
        ptx::named_barrier_sync(1u32, 128u32);
    } else {
        ptx::named_barrier_sync(2u32, 128u32);
    }
}

/// Stages the dQ of a q block in shared memory, every unit's registers in its own order, and starts the bulk reduction
/// that adds it to `dq_accum`. The previous reduction must have read the stage, and the warpgroup must have
/// synchronised since.
#[cube]
pub fn reduce_dq(dq_accum: &mut [Quad], target: u32, dq_stage: &mut Shared<[Quad]>, values: &Array<f32>) {
    let unit = bulk::opaque(UNIT_POS % 128);
    let own = ((UNIT_POS / 128) * DQ_HALF) as usize;
    #[unroll]
    for i in 0..8usize {
        let mut quad = Quad::empty();
        #[unroll]
        for j in 0..4usize {
            quad.insert(j, values[comptime![4 * i + j]]);
        }
        dq_stage[own + unit as usize + comptime![128 * i]] = quad;
    }
    sync_async_proxy_shared();
    sync_warpgroup();
    if unit == 0 {
        let from = bulk::address(dq_stage.as_slice()) + (UNIT_POS / 128) * comptime![16 * DQ_HALF];
        bulk::bulk_add(dq_accum, target as usize, from, comptime![16 * DQ_HALF]);
    }
}

/// Eight adjacent 16-bit numbers.
type Octet<E> = Vector<E, Const<8>>;

/// Sets all of `sum` to zero. 256 units.
#[cube(launch_unchecked)]
pub fn clear_dq_accum(sum: &mut [Quad]) {
    let mut i = CUBE_POS_X as usize * 256 + UNIT_POS as usize;
    let stride = CUBE_COUNT_X as usize * 256;
    while i < sum.len() {
        sum[i] = Quad::new(0.0);
        i += stride;
    }
}

/// `dq = scale · sum`, with `sum` in the order of [`dqdkdv`](super::dqdkdv). 256 units, each eight columns of two rows;
/// cube `(q block, head, sequence)`; `blocks` of a head; strides in units of eight elements.
#[cube(launch_unchecked)]
pub fn convert_dq<E: Float>(
    sum: &[Quad],
    dq: &mut [Octet<E>],
    query_starts: &[i32],
    queries: u32,
    blocks: u32,
    by_row: u32,
    by_batch: u32,
    by_head: u32,
    scale: f32,
    #[comptime] packed: bool,
    #[comptime] head_dim: usize,
) {
    let (q_block, head) = (CUBE_POS_X, CUBE_POS_Y);
    let mut batch = CUBE_POS_Z;
    let mut own = q_block;
    let mut first_row = 0u32;
    let mut rows = queries;
    if comptime![packed] {
        first_row = bounded(query_starts[CUBE_POS_Z as usize], queries);
        rows = u32::max(bounded(query_starts[CUBE_POS_Z as usize + 1], queries), first_row) - first_row;
        if q_block * comptime![block(head_dim) as u32] >= rows {
            terminate!();
        }
        batch = 0u32;
        own = first_block(first_row, CUBE_POS_Z, comptime![block(head_dim)]) + q_block;
    }
    let (eight, line, plane) = (UNIT_POS % 8, (UNIT_POS / 8) % 8, UNIT_POS / 64);
    let first = ((batch * CUBE_COUNT_Y + head) * blocks + own) * comptime![2 * DQ_HALF];
    #[unroll]
    for half in 0..2u32 {
        // The upper and the lower rows, or the left and the right columns.
        let (down, right) =
            comptime![if head_dim == ROWS { (half * ROWS as u32, 0) } else { (0, half * ROWS as u32 / 8) }];
        let from = (first + half * DQ_HALF + eight * 128 + plane * 32 + line * 4) as usize;
        let mut upper = Octet::<E>::empty();
        let mut lower = Octet::<E>::empty();
        #[unroll]
        for i in 0..4usize {
            let quad = sum[from + i];
            #[unroll]
            for j in 0..2usize {
                upper.insert(comptime![2 * i + j], E::cast_from(quad.extract(j) * scale));
                lower.insert(comptime![2 * i + j], E::cast_from(quad.extract(comptime![2 + j]) * scale));
            }
        }
        let row = q_block * comptime![block(head_dim) as u32] + down + plane * 16 + line;
        let at = batch * by_batch + head * by_head + right + eight;
        if row < rows {
            dq[((first_row + row) * by_row + at) as usize] = upper;
        }
        if row + 8 < rows {
            dq[((first_row + row + 8) * by_row + at) as usize] = lower;
        }
    }
}
