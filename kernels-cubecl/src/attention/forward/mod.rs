//! The forward kernel: two warpgroups of 64 query rows each; one of their units also drives the copy engine.
//!
//! A third warpgroup for the copies would leave each unit 168 registers: CubeCL has the driver link its kernels, and in
//! that mode `setmaxnreg` is ignored.
mod plan;
mod step;

pub use plan::ForwardPlan;

use super::tile::{self, HIDDEN};
use super::variant::{Sizes, part};
use super::walk::{self, Fixed, Place};
use crate::hopper::mma::{self, Pair};
use crate::hopper::ptx;
use crate::hopper::ring::barrier_at;
use cubecl::prelude::*;
use half::bf16;
use step::{FIRST_TURN, Operands, RowState, advance, softmax};

const LN_2: f32 = core::f32::consts::LN_2;

/// `out = softmax(q kᵀ · scale) v` for 128 query rows of one head; `lse` gets the natural logarithm of the sum of
/// exponentials. 256 units; cube `(head, sequence, block)`; tensor maps as `maps` makes them, with boxes of 64 rows
/// (`q`), `block` rows (`k`, `v`), and those for stores (`out`). A row that sees no key gets zeros and minus infinity.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn forward(
    q: &TensorMap<bf16, Tiled>,
    k: &TensorMap<bf16, Tiled>,
    v: &TensorMap<bf16, Tiled>,
    out: &mut TensorMap<bf16, Tiled>,
    lse: &mut [f32],
    drop_keys: &[u32],
    query_starts: &[i32],
    key_starts: &[i32],
    sizes: Sizes,
    scale_log2: f32,
    #[comptime] plan: ForwardPlan,
) {
    let variant = comptime![plan.variant];
    let d = comptime![variant.head_dim];
    let block = comptime![plan.block];
    let q_tile = comptime![mma::ROWS * variant.key_width() / 2];

    let head = CUBE_POS_X;
    let part = part(query_starts, key_starts, &sizes, variant.packed);
    walk::leave_behind_the_end(&part, variant);

    let mut q_smem = Shared::<[Pair]>::new_aligned_slice(comptime![2 * q_tile], 1024usize);
    let q_full = Shared::<[u64]>::new_slice(1usize);
    if UNIT_POS == 0 {
        barrier_at(&q_full, 0usize).init_manual(1);
    }
    let mut k_ring = tile::ring(plan.stages, block, comptime![variant.key_width()]);
    let mut v_ring = tile::ring(plan.stages, block, comptime![variant.value_width()]);
    sync_async_proxy_shared();
    sync_cube();

    let first_row = walk::first_row(&part, variant);
    let blocks = walk::blocks(first_row, &part, block, variant);
    let source = walk::source(&part, &blocks, head, &sizes);
    let count = source.count;
    let role = plane_broadcast(UNIT_POS / 128, 0u32);
    if UNIT_POS == 0 {
        let full = barrier_at(&q_full, 0usize);
        full.arrive_and_expect_tx(1, comptime![(4 * 2 * q_tile) as u32]);
        #[unroll]
        for wg in 0..2usize {
            let row = (part.first_query + first_row) as i32 + comptime![(wg * mma::ROWS) as i32];
            let tile = q_smem.slice_mut(comptime![wg * q_tile], comptime![(wg + 1) * q_tile]);
            tile::fetch(&q_full, 0usize, tile, q, source.batch, head as i32, row, mma::ROWS, d);
        }
        walk::load(&mut k_ring, k, &source, 0u32, d, block, plan.stages);
        walk::load(&mut v_ring, v, &source, 0u32, variant.value_dim, block, plan.stages);
        if count > 1 {
            walk::load(&mut k_ring, k, &source, 1u32, d, block, plan.stages);
        }
    }

    let lane = UNIT_POS % 32;
    let row = first_row + role * 64 + ((UNIT_POS / 32) % 4) * 16 + lane / 4;
    let place = Place { role, row, column: (lane % 4) * 2 };
    let own = role as usize * q_tile;
    let at = Operands {
        q: mma::descriptor(q_smem.slice(own, own + q_tile), comptime![mma::k_major(mma::ROWS, variant.key_width())]),
        k: mma::descriptor(k_ring.tiles.as_slice(), comptime![mma::k_major(block, variant.key_width())]),
        v: mma::descriptor(v_ring.tiles.as_slice(), comptime![mma::mn_major(variant.value_width(), block)]),
    };

    let statistics = (part.batch as u32 * CUBE_COUNT_X + head) * sizes.stride + part.first_query;
    let mut state = RowState {
        scores: Array::new(comptime![block / 2]),
        sum: Array::new(comptime![variant.value_dim / 2]),
        weights: tile::operand(block),
        top: Array::new(2usize),
        total: Array::new(2usize),
        factor: Array::new(2usize),
        draws: tile::draws(drop_keys, statistics, row, part.sight.queries, sizes.statistics, variant.dropout),
    };
    mma::fill(&mut state.sum, 0.0, comptime![variant.value_dim / 2]);
    mma::fill(&mut state.top, HIDDEN, 2usize);
    mma::fill(&mut state.total, 0.0, 2usize);

    // The first block has no predecessor whose product with the values could run under its softmax.
    let first = tile::slot(0u32, plan.stages);
    barrier_at(&q_full, 0usize).wait_parity(0);
    tile::arrived(&mut k_ring, &first);
    tile::issue_scores(&mut state.scores, at.q, at.k, block, d, variant.element);
    mma::wait(0usize);
    mma::pin(&mut state.scores);
    tile::release(&mut k_ring, &first);
    let last = (blocks.end - 1) * comptime![block as u32];
    tile::hide(&mut state.scores, row, last + place.column, &part.sight, block, variant);
    softmax(&mut state, &source, last + place.column, scale_log2, plan);
    tile::pack_operand(&mut state.weights, &state.scores, block, false, variant.element);

    let fixed = Fixed::<Operands> { place, part, source, at, scale_log2 };
    if comptime![plan.turns] {
        if role == 1 {
            ptx::named_barrier_arrive(FIRST_TURN, 256u32);
        }
    }
    if comptime![variant.window] {
        for step in 1..count {
            let edge = step < blocks.edge || step + blocks.low_edge >= count;
            advance(&mut state, &mut k_ring, &mut v_ring, &fixed, k, v, step, edge, plan);
        }
    } else {
        for step in 1..blocks.edge {
            advance(&mut state, &mut k_ring, &mut v_ring, &fixed, k, v, step, true, plan);
        }
        for step in u32::max(1, blocks.edge)..count {
            advance(&mut state, &mut k_ring, &mut v_ring, &fixed, k, v, step, false, plan);
        }
    }
    let slot = tile::slot(count - 1, plan.stages);
    tile::arrived(&mut v_ring, &slot);
    let v_tile = fixed.at.v + tile::offset(&slot, block, comptime![variant.value_width()]);
    tile::issue_product(&mut state.sum, &mut state.weights, v_tile, block, variant.value_dim, variant.element);
    // Takes the last turn that the second warpgroup gives.
    if comptime![plan.turns] {
        if role == 0 {
            ptx::named_barrier_sync(FIRST_TURN, 256u32);
        }
    }

    // Each row's sum is spread over four lanes.
    #[unroll]
    for half in 0..2usize {
        let sum = state.total[half] + plane_shuffle_xor(state.total[half], 1u32);
        let sum = sum + plane_shuffle_xor(sum, 2u32);
        let mut factor = select(sum > 0.0, ptx::reciprocal(sum), 0.0);
        if comptime![variant.dropout] {
            factor = factor * sizes.keep;
        }
        state.factor[half] = factor;
        let at = row + comptime![(half * 8) as u32];
        // The last block of packed rows is followed by the next sequence, otherwise by padding.
        let end = if comptime![variant.packed] { fixed.part.sight.queries } else { sizes.stride };
        if lane % 4 == 0 && at < end {
            // Without a key: the logarithm of zero.
            let value = (state.top[half] * scale_log2 + ptx::log2(sum)) * LN_2;
            lse[(statistics + at) as usize] = value;
        }
    }
    mma::wait(0usize);
    mma::pin(&mut state.sum);
    // The query tile is no longer needed and takes the output.
    let tile = q_smem.slice_mut(own, own + q_tile);
    tile::store(
        &state.sum,
        &state.factor,
        tile,
        out,
        &fixed.part,
        head as i32,
        fixed.part.first_query,
        first_row + role * 64,
        fixed.part.sight.queries,
        variant.value_dim,
        variant,
    );
}
