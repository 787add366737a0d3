//! The gradients of the queries that [`joint_gradient`](super::joint_gradient) leaves in parts: added up in memory by
//! the copy engine, then put in order.
use super::joint_gradient::{BLOCK, D};
use super::variant::bounded;
use super::{AttentionShape, Extras};
use crate::hopper::bulk::{self, Quad};
use crate::hopper::ptx;
use cubecl::prelude::*;

/// Quads of the columns that a warpgroup computes of a step's queries: eight for each of its units.
pub const HALF: u32 = (BLOCK * D / 8) as u32;

/// Blocks in which a head's gradients of the queries are added up: those of a packed sequence begin behind those of the
/// one before, and one of them may be left over.
pub fn blocks_of_head(shape: &AttentionShape, extras: &Extras) -> usize {
    shape.padded_queries() / BLOCK + extras.packed.map_or(0, |packed| packed.sequences)
}

/// Numbers in which the gradients of all queries are added up, `[batch, heads, blocks, 2, 8, 128]` of four; one block
/// more for keys that no query sees, whose zeros may go there.
pub fn len(shape: &AttentionShape, extras: &Extras) -> usize {
    (shape.batch * shape.heads * blocks_of_head(shape, extras) + 1) * BLOCK * D
}

/// Whether packed sequences are so long that they leave less than half of their blocks empty.
pub fn fits(shape: &AttentionShape, extras: &Extras) -> bool {
    extras.packed.is_none_or(|packed| packed.sequences * BLOCK <= shape.queries)
}

/// The first block of a head for packed sequence `sequence`, which begins at `first_query`.
#[cube]
pub fn first_block(first_query: u32, sequence: u32) -> u32 {
    first_query / comptime![BLOCK as u32] + sequence
}

/// The warpgroup meets.
#[cube]
pub fn meet() {
    if UNIT_POS < 128 {
        ptx::named_barrier_sync(1u32, 128u32);
    } else {
        ptx::named_barrier_sync(2u32, 128u32);
    }
}

/// Has the copy engine add a step's gradients of the queries, every unit's in the order in which it holds them. The
/// warpgroup has met since what it staged last was read.
#[cube]
pub fn add_up(q_sum: &mut [Quad], target: u32, stage: &mut Shared<[Quad]>, values: &Array<f32>) {
    let unit = bulk::here(UNIT_POS % 128);
    let own = ((UNIT_POS / 128) * HALF) as usize;
    #[unroll]
    for i in 0..comptime![D / 16] {
        let mut quad = Quad::empty();
        #[unroll]
        for j in 0..4usize {
            quad.insert(j, values[comptime![4 * i + j]]);
        }
        stage[own + unit as usize + comptime![128 * i]] = quad;
    }
    sync_async_proxy_shared();
    meet();
    if unit == 0 {
        let from = bulk::address(stage.as_slice()) + (UNIT_POS / 128) * comptime![16 * HALF];
        bulk::bulk_add(q_sum, target as usize, from, comptime![16 * HALF]);
    }
}

/// Eight adjacent 16-bit numbers.
type Octet<E> = Vector<E, Const<8>>;

/// Sets all of `sum` to zero. 256 units.
#[cube(launch_unchecked)]
pub fn clear(sum: &mut [Quad]) {
    let mut i = CUBE_POS_X as usize * 256 + UNIT_POS as usize;
    let stride = CUBE_COUNT_X as usize * 256;
    while i < sum.len() {
        sum[i] = Quad::new(0.0);
        i += stride;
    }
}

/// `gradient = scale · sum`, the sums in the order of [`joint_gradient`]. 256 units, each eight columns of two rows;
/// cube `(block, head, sequence)`; `blocks` of a head; strides in units of eight elements.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn gather<E: Float>(
    sum: &[Quad],
    gradient: &mut [Octet<E>],
    query_starts: &[i32],
    queries: u32,
    blocks: u32,
    by_row: u32,
    by_batch: u32,
    by_head: u32,
    scale: f32,
    #[comptime] packed: bool,
) {
    let (block, head) = (CUBE_POS_X, CUBE_POS_Y);
    let mut batch = CUBE_POS_Z;
    let mut own = block;
    let mut first_row = 0u32;
    let mut rows = queries;
    if comptime![packed] {
        first_row = bounded(query_starts[CUBE_POS_Z as usize], queries);
        rows = u32::max(bounded(query_starts[CUBE_POS_Z as usize + 1], queries), first_row) - first_row;
        if block * comptime![BLOCK as u32] >= rows {
            terminate!();
        }
        batch = 0u32;
        own = first_block(first_row, CUBE_POS_Z) + block;
    }
    let (eight, line, plane) = (UNIT_POS % 8, (UNIT_POS / 8) % 8, UNIT_POS / 64);
    let first = ((batch * CUBE_COUNT_Y + head) * blocks + own) * comptime![2 * HALF];
    #[unroll]
    for half in 0..2u32 {
        let from = (first + half * HALF + eight * 128 + plane * 32 + line * 4) as usize;
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
        let row = block * comptime![BLOCK as u32] + plane * 16 + line;
        let at = batch * by_batch + head * by_head + half * 8 + eight;
        if row < rows {
            gradient[((first_row + row) * by_row + at) as usize] = upper;
        }
        if row + 8 < rows {
            gradient[((first_row + row + 8) * by_row + at) as usize] = lower;
        }
    }
}
