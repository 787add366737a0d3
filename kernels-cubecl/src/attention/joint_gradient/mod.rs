//! All three gradients in one pass over the scores: five products where the two other kernels take seven.
//!
//! Like the key gradient kernel, 128 keys of one key head a cube. The gradients of a query come from many cubes, which
//! add them up in memory in no particular order: two calls differ in the last bits.
mod mask;
mod plan;
mod slopes;
mod step;

pub use plan::{BLOCK, D, JointGradientPlan};

use super::joint_sum::{self, HALF, add_up, meet};
use super::query_walk;
use super::tile;
use super::variant::{Sizes, part};
use crate::hopper::bulk::{self, Quad};
use crate::hopper::mma::{self, Pair};
use crate::hopper::ring::barrier_at;
use crate::tiling::{KEY_ROWS, QueryBlocks};
use cubecl::prelude::*;
use half::bf16;
use mask::seen_by;
use plan::{KEY_TILE, PLACES, SLOPE_TILE};
use slopes::{issue_query_gradient, place_of, wait_for_slopes};
use step::{JointState, Operands, Shares, advance, load};

const LOG2_E: f32 = core::f32::consts::LOG2_E;

/// The gradients of keys and values as [`key_gradient`](super::key_gradient) writes them, and those of the queries, not
/// yet scaled, added to `q_sum` in the order that [`gather`](super::joint_sum::gather()) reads. 256 units; cube `(key
/// head, sequence, block)`; boxes of 64 rows, those for stores (the gradients), and a block's columns of both kinds of
/// `sums`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn joint_gradient(
    q: &TensorMap<bf16, Tiled>,
    k: &TensorMap<bf16, Tiled>,
    v: &TensorMap<bf16, Tiled>,
    out_gradient: &TensorMap<bf16, Tiled>,
    sums: &TensorMap<f32, Tiled>,
    query_starts: &[i32],
    key_starts: &[i32],
    q_sum: &mut [Quad],
    k_gradient: &mut TensorMap<bf16, Tiled>,
    v_gradient: &mut TensorMap<bf16, Tiled>,
    sizes: Sizes,
    scale: f32,
    #[comptime] plan: JointGradientPlan,
) {
    let variant = comptime![plan.variant];
    let kv_head = CUBE_POS_X;
    let part = part(query_starts, key_starts, &sizes, variant.packed);
    // Causal keys further up have more queries: they start first, of all heads. Head by head the cache would hold the
    // sums, but the last head's longest cubes would run alone at the end.
    let first_key = CUBE_POS_Z * comptime![KEY_ROWS as u32];
    if comptime![variant.packed] {
        // The grid is as large as the longest sequence asks for.
        if first_key >= part.sight.keys {
            terminate!();
        }
    }

    let mut k_smem = Shared::<[Pair]>::new_aligned_slice(comptime![2 * KEY_TILE], 1024usize);
    let mut v_smem = Shared::<[Pair]>::new_aligned_slice(comptime![2 * KEY_TILE], 1024usize);
    let slopes_smem = Shared::<[Pair]>::new_aligned_slice(comptime![PLACES * 2 * SLOPE_TILE], 1024usize);
    let stage = Shared::<[Quad]>::new_aligned_slice(comptime![2 * HALF as usize], 128usize);
    let there = Shared::<[u64]>::new_slice(PLACES);
    let fixed = Shared::<[u64]>::new_slice(1usize);
    if UNIT_POS == 0 {
        barrier_at(&fixed, 0usize).init_manual(1);
        #[unroll]
        for place in 0..PLACES {
            barrier_at(&there, place).init_manual(8);
        }
    }
    let mut q_ring = tile::ring(plan.stages, BLOCK, D);
    let mut g_ring = tile::ring(plan.stages, BLOCK, D);
    let sums_smem = Shared::<[f32]>::new_aligned_slice(comptime![plan.stages * plan.statistics()], 128usize);
    sync_async_proxy_shared();
    sync_cube();

    let blocks = QueryBlocks::new(
        first_key,
        &part.sight,
        comptime![BLOCK as u32],
        comptime![variant.causal],
        comptime![variant.window],
        comptime![plan.bounded()],
    );
    let source = query_walk::source(&part, &blocks, kv_head, &sizes);
    let role = plane_broadcast(UNIT_POS / 128, 0u32);
    let mut shared = Shares { sums: sums_smem, slopes: slopes_smem, there, stage };
    if UNIT_POS == 0 {
        let full = barrier_at(&fixed, 0usize);
        full.arrive_and_expect_tx(1, comptime![(4 * 4 * KEY_TILE) as u32]);
        #[unroll]
        for wg in 0..2usize {
            let row = (part.first_key + first_key) as i32 + comptime![(wg * mma::ROWS) as i32];
            let (from, to) = comptime![(wg * KEY_TILE, (wg + 1) * KEY_TILE)];
            let head = kv_head as i32;
            tile::fetch(&fixed, 0usize, k_smem.slice_mut(from, to), k, source.batch, head, row, mma::ROWS, D);
            tile::fetch(&fixed, 0usize, v_smem.slice_mut(from, to), v, source.batch, head, row, mma::ROWS, D);
        }
        // All but one stage; the steps keep that distance.
        for step in 0..u32::min(source.total, comptime![plan.stages as u32 - 1]) {
            load(&mut q_ring, &mut g_ring, &mut shared, q, out_gradient, sums, &source, step, plan);
        }
    }

    let lane = UNIT_POS % 32;
    let row = first_key + role * 64 + ((UNIT_POS / 32) % 4) * 16 + lane / 4;
    let own = role as usize * KEY_TILE;
    let columns = comptime![mma::mn_major(D, mma::ROWS)];
    let half = comptime![mma::advance(columns, D / 2, 0)];
    let at = Operands {
        k: mma::descriptor(k_smem.slice(own, own + KEY_TILE), comptime![mma::k_major(mma::ROWS, D)]),
        k_columns: mma::descriptor(k_smem.as_slice(), columns) + role as u64 * half,
        v: mma::descriptor(v_smem.slice(own, own + KEY_TILE), comptime![mma::k_major(mma::ROWS, D)]),
        q: mma::descriptor(q_ring.tiles.as_slice(), comptime![mma::k_major(BLOCK, D)]),
        q_columns: mma::descriptor(q_ring.tiles.as_slice(), comptime![mma::mn_major(D, BLOCK)]),
        out_gradient: mma::descriptor(g_ring.tiles.as_slice(), comptime![mma::k_major(BLOCK, D)]),
        out_gradient_columns: mma::descriptor(g_ring.tiles.as_slice(), comptime![mma::mn_major(D, BLOCK)]),
        slopes: mma::descriptor(shared.slopes.as_slice(), comptime![mma::k_major(mma::ROWS, BLOCK)])
            + role as u64 * comptime![(SLOPE_TILE * 4 / 16) as u64],
        slope_columns: mma::descriptor(shared.slopes.as_slice(), comptime![mma::mn_major(BLOCK, KEY_ROWS)]),
    };
    let mut state = JointState {
        scores: Array::new(comptime![BLOCK / 2]),
        slopes: Array::new(comptime![BLOCK / 2]),
        weights: tile::operand(BLOCK),
        k_sum: Array::new(comptime![D / 2]),
        v_sum: Array::new(comptime![D / 2]),
    };
    mma::fill(&mut state.k_sum, 0.0, comptime![D / 2]);
    mma::fill(&mut state.v_sum, 0.0, comptime![D / 2]);
    let scale_log2 = scale * LOG2_E;
    let seen = seen_by(&part, row, (lane % 4) * 2, plan);
    // Where this unit's part of the first step's queries lies. The blocks of a head are adjacent; from its last one to
    // the first of the next head it is a jump over the blocks that see none of the keys.
    let mut blocks_of_head = sizes.stride / comptime![BLOCK as u32];
    let mut head_before = (CUBE_POS_Y * CUBE_COUNT_X + kv_head) * sizes.group;
    let mut first_block = blocks.first;
    if comptime![variant.packed] {
        blocks_of_head += CUBE_COUNT_Y;
        head_before = kv_head * sizes.group;
        first_block += joint_sum::first_block(part.first_query, CUBE_POS_Y);
    }
    let jump = (blocks_of_head + 1 - source.steps) * comptime![2 * HALF];
    let first_block = head_before * blocks_of_head + first_block;
    // Two steps before the first.
    let mut target = first_block * comptime![2 * HALF] + role * HALF + UNIT_POS % 128 - jump - comptime![2 * HALF];

    barrier_at(&fixed, 0usize).wait_parity(0);
    // One loop over the blocks of all heads: the assembler lets no products overlap in a loop in a loop.
    let mut in_head = 0u32;
    let mut before = 1u32;
    let mut step = 0u32;
    loop {
        let block_start = (blocks.first + in_head) * comptime![BLOCK as u32];
        let mut edge = in_head < blocks.edge;
        if comptime![plan.bounded()] {
            edge = edge || in_head + blocks.high_edge >= source.steps;
        }
        if comptime![variant.packed && !variant.causal] {
            edge = edge || first_key + comptime![KEY_ROWS as u32] > part.sight.keys;
        }
        advance(
            &mut state,
            &mut q_ring,
            &mut g_ring,
            &mut shared,
            &source,
            &at,
            q,
            out_gradient,
            sums,
            q_sum,
            target,
            step,
            scale_log2,
            edge,
            &seen,
            block_start as i32,
            plan,
        );
        target += select(before == 0, jump, comptime![2 * HALF]);
        before = in_head;
        in_head = select(in_head + 1 == source.steps, 0, in_head + 1);
        step += 1;
        if step == source.total {
            break;
        }
    }
    mma::wait(0usize);
    mma::pin(&mut state.slopes);
    mma::pin(&mut state.k_sum);
    mma::pin(&mut state.v_sum);
    if step > 1 {
        add_up(q_sum, target, &mut shared.stage, &state.slopes);
    }
    target += select(before == 0, jump, comptime![2 * HALF]);
    wait_for_slopes(&mut shared, step - 1);
    issue_query_gradient(&mut state.slopes, at.slope_columns + place_of(step - 1), at.k_columns, variant.element);
    mma::wait(0usize);
    mma::pin(&mut state.slopes);
    if UNIT_POS % 128 == 0 {
        bulk::wait_for_reads();
    }
    meet();
    add_up(q_sum, target, &mut shared.stage, &state.slopes);
    if UNIT_POS % 128 == 0 {
        bulk::wait_for_reads();
    }
    // All have read the keys before the gradients take their place.
    sync_cube();
    let mut factor = Array::<f32>::new(2usize);
    let at_row = first_key + role * 64;
    mma::fill(&mut factor, 1.0, 2usize);
    let tile = v_smem.slice_mut(own, own + KEY_TILE);
    let (head, from, rows) = (kv_head as i32, part.first_key, part.sight.keys);
    tile::store(&state.v_sum, &factor, tile, v_gradient, &part, head, from, at_row, rows, D, variant);
    mma::fill(&mut factor, scale, 2usize);
    let tile = k_smem.slice_mut(own, own + KEY_TILE);
    tile::store(&state.k_sum, &factor, tile, k_gradient, &part, head, from, at_row, rows, D, variant);
}
