//! The gradients of the keys and values: 128 keys of one key head a cube, over the queries of the heads that share it.
//!
//! The products are taken transposed, keys as rows: what the softmax leaves in a warpgroup's registers then is the left
//! operand of the next product, and no score passes through shared memory.
use super::tile::{self, HIDDEN, Ring};
use crate::hopper::mma::{self, Pair};
use crate::hopper::ptx;
use crate::hopper::ring::barrier_at;
use crate::tiling::{KEY_ROWS, QueryBlocks};
use cubecl::prelude::*;
use half::bf16;

/// What is fixed when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeyGradientPlan {
    /// Length of a query, key and value.
    pub head_dim: usize,
    /// Queries per step; divides 128.
    pub block: usize,
    /// Query tiles in flight.
    pub stages: usize,
    /// Query i sees the keys up to i, the last query the last key.
    pub causal: bool,
    /// The gradients of the probabilities are started before the last step's products are done. Needs 32 registers more.
    pub early: bool,
}

impl KeyGradientPlan {
    /// What was fastest on an H200 (8192 queries and keys, 32 and 8 heads).
    pub fn fastest(head_dim: usize, causal: bool) -> Self {
        let block = if head_dim == 64 { 128 } else { 64 };
        Self { head_dim, block, stages: 2, causal, early: false }
    }
}

const LOG2_E: f32 = core::f32::consts::LOG2_E;

/// `k_gradient = scale · dSᵀ q` and `v_gradient = Pᵀ out_gradient` with `dS` and `P` as in
/// [`query_gradient`](super::query_gradient). 256 units; cube `(key head, batch, block)`; boxes of 64 rows (`k`, `v`),
/// `block` rows (`q`, `out_gradient`) and 16 rows of 64 columns (the gradients).
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn key_gradient(
    q: &TensorMap<bf16, Tiled>,
    k: &TensorMap<bf16, Tiled>,
    v: &TensorMap<bf16, Tiled>,
    out_gradient: &TensorMap<bf16, Tiled>,
    lse: &[f32],
    delta: &[f32],
    k_gradient: &mut TensorMap<bf16, Tiled>,
    v_gradient: &mut TensorMap<bf16, Tiled>,
    queries: u32,
    keys: u32,
    statistics_stride: u32,
    group: u32,
    scale: f32,
    #[comptime] plan: KeyGradientPlan,
) {
    let d = comptime![plan.head_dim];
    let block = comptime![plan.block];
    let k_tile = comptime![mma::ROWS * d / 2];

    let mut k_smem = Shared::<[Pair]>::new_aligned_slice(comptime![2 * k_tile], 1024usize);
    let mut v_smem = Shared::<[Pair]>::new_aligned_slice(comptime![2 * k_tile], 1024usize);
    let fixed = Shared::<[u64]>::new_slice(1usize);
    if UNIT_POS == 0 {
        barrier_at(&fixed, 0usize).init_manual(1);
    }
    let mut q_ring = tile::ring(plan.stages, block, d);
    let mut g_ring = tile::ring(plan.stages, block, d);
    let lse_smem = Shared::<[f32]>::new_aligned_slice(comptime![plan.stages * block], 128usize);
    let delta_smem = Shared::<[f32]>::new_aligned_slice(comptime![plan.stages * block], 128usize);
    sync_async_proxy_shared();
    sync_cube();

    let kv_head = CUBE_POS_X;
    let batch = CUBE_POS_Y;
    // Causal keys further up have more queries: they start first.
    let first_key = CUBE_POS_Z * comptime![KEY_ROWS as u32];
    let blocks = QueryBlocks::new(first_key, queries, keys, comptime![block as u32], comptime![plan.causal]);
    let steps = blocks.count - blocks.first;
    let source = Source {
        batch: batch as i32,
        head: kv_head * group,
        heads: CUBE_COUNT_X * group,
        stride: statistics_stride,
        first: blocks.first,
        steps,
        total: steps * group,
    };
    let role = plane_broadcast(UNIT_POS / 128, 0u32);
    let mut statistics = Statistics { lse: lse_smem, delta: delta_smem };
    if UNIT_POS == 0 {
        let full = barrier_at(&fixed, 0usize);
        full.arrive_and_expect_tx(1, comptime![(4 * 4 * k_tile) as u32]);
        #[unroll]
        for wg in 0..2usize {
            let row = first_key as i32 + comptime![(wg * mma::ROWS) as i32];
            let (from, to) = comptime![(wg * k_tile, (wg + 1) * k_tile)];
            full.tma_load_5d(k, k_smem.slice_mut(from, to), source.batch, kv_head as i32, 0, row, 0);
            full.tma_load_5d(v, v_smem.slice_mut(from, to), source.batch, kv_head as i32, 0, row, 0);
        }
        // All but one stage; the steps keep that distance.
        for step in 0..u32::min(source.total, comptime![plan.stages as u32 - 1]) {
            load(&mut q_ring, &mut g_ring, &mut statistics, q, out_gradient, lse, delta, &source, step, plan);
        }
    }

    let lane = UNIT_POS % 32;
    let row = first_key + role * 64 + ((UNIT_POS / 32) % 4) * 16 + lane / 4;
    let own = role as usize * k_tile;
    let at = Operands {
        k: mma::descriptor(k_smem.slice(own, own + k_tile), comptime![mma::k_major(mma::ROWS, d)]),
        v: mma::descriptor(v_smem.slice(own, own + k_tile), comptime![mma::k_major(mma::ROWS, d)]),
        q: mma::descriptor(q_ring.tiles.as_slice(), comptime![mma::k_major(block, d)]),
        q_columns: mma::descriptor(q_ring.tiles.as_slice(), comptime![mma::mn_major(d, block)]),
        out_gradient: mma::descriptor(g_ring.tiles.as_slice(), comptime![mma::k_major(block, d)]),
        out_gradient_columns: mma::descriptor(g_ring.tiles.as_slice(), comptime![mma::mn_major(d, block)]),
    };
    let mut state = KeyState {
        scores: Array::new(comptime![block / 2]),
        slopes: Array::new(comptime![block / 2]),
        weights: tile::operand(block),
        operand: tile::operand(block),
        k_sum: Array::new(comptime![d / 2]),
        v_sum: Array::new(comptime![d / 2]),
    };
    mma::fill(&mut state.k_sum, 0.0, comptime![d / 2]);
    mma::fill(&mut state.v_sum, 0.0, comptime![d / 2]);
    let scale_log2 = scale * LOG2_E;
    // The first query that sees the key of this unit's first row, counted from its first column.
    let seen_from = (row + queries) as i32 - keys as i32 - ((lane % 4) * 2) as i32;

    barrier_at(&fixed, 0usize).wait_parity(0);
    // One loop over the blocks of all heads: the assembler lets no products overlap in a loop in a loop.
    let mut in_head = 0u32;
    let mut step = 0u32;
    loop {
        let block_start = (blocks.first + in_head) * comptime![block as u32];
        advance(
            &mut state,
            &mut q_ring,
            &mut g_ring,
            &mut statistics,
            &source,
            &at,
            q,
            out_gradient,
            lse,
            delta,
            step,
            scale_log2,
            in_head < blocks.edge,
            seen_from - block_start as i32,
            plan,
        );
        in_head = select(in_head + 1 == steps, 0, in_head + 1);
        step += 1;
        if step == source.total {
            break;
        }
    }
    mma::wait(0usize);
    mma::pin(&mut state.k_sum);
    mma::pin(&mut state.v_sum);
    // The key and value tiles are no longer needed and take the gradients.
    let mut factor = Array::<f32>::new(2usize);
    let at_row = first_key + role * 64;
    mma::fill(&mut factor, 1.0, 2usize);
    let tile = v_smem.slice_mut(own, own + k_tile);
    tile::store(&state.v_sum, &factor, tile, v_gradient, batch as i32, kv_head as i32, at_row, d);
    mma::fill(&mut factor, scale, 2usize);
    let tile = k_smem.slice_mut(own, own + k_tile);
    tile::store(&state.k_sum, &factor, tile, k_gradient, batch as i32, kv_head as i32, at_row, d);
}

/// Which queries a cube reads.
#[derive(CubeType)]
struct Source {
    batch: i32,
    /// First query head of the group.
    head: u32,
    /// All query heads.
    heads: u32,
    /// Row length of the statistics.
    stride: u32,
    /// First block of each head.
    first: u32,
    /// Blocks of each head.
    steps: u32,
    /// Blocks of all heads of the group.
    total: u32,
}

/// `lse` and `delta` of the queries in the ring.
#[derive(CubeType)]
struct Statistics {
    lse: Shared<[f32]>,
    delta: Shared<[f32]>,
}

/// Descriptors of the warpgroup's keys and values and of the first query and output gradient tile; the last two also as
/// columns to sum over.
#[derive(CubeType)]
struct Operands {
    k: u64,
    v: u64,
    q: u64,
    q_columns: u64,
    out_gradient: u64,
    out_gradient_columns: u64,
}

/// What a unit holds of its warpgroup's 64 keys: two rows, of each every fourth pair of columns.
#[derive(CubeType)]
struct KeyState {
    /// Scores, then probabilities.
    scores: Array<f32>,
    /// Gradients of the probabilities, then of the scores.
    slopes: Array<f32>,
    /// The probabilities in bf16.
    weights: Sequence<Array<u32>>,
    /// The gradients of the scores in bf16.
    operand: Sequence<Array<u32>>,
    /// The gradient of the keys so far, not yet scaled.
    k_sum: Array<f32>,
    /// The gradient of the values so far.
    v_sum: Array<f32>,
}

/// Starts the copy of the tiles of step `step`.
#[cube]
#[allow(clippy::too_many_arguments)]
fn load(
    q_ring: &mut Ring,
    g_ring: &mut Ring,
    statistics: &mut Statistics,
    q: &TensorMap<bf16, Tiled>,
    out_gradient: &TensorMap<bf16, Tiled>,
    lse: &[f32],
    delta: &[f32],
    source: &Source,
    step: u32,
    #[comptime] plan: KeyGradientPlan,
) {
    let block = comptime![plan.block];
    let slot = tile::slot(step, plan.stages);
    let head = source.head + step / source.steps;
    let row = (source.first + step % source.steps) * comptime![block as u32];
    let bytes = comptime![(4 * block) as u32];
    let from = ((source.batch as u32 * source.heads + head) * source.stride + row) as usize;
    let to = slot.stage * block;
    tile::load(q_ring, &slot, q, source.batch, head as i32, row as i32, bytes, plan.block, plan.head_dim);
    barrier_at(&q_ring.full, slot.stage)
        .memcpy_async_tx(lse.slice(from, from + block), statistics.lse.slice_mut(to, to + block));
    tile::load(g_ring, &slot, out_gradient, source.batch, head as i32, row as i32, bytes, plan.block, plan.head_dim);
    barrier_at(&g_ring.full, slot.stage)
        .memcpy_async_tx(delta.slice(from, from + block), statistics.delta.slice_mut(to, to + block));
}

/// One query block. Its last two products still run when this returns, and are waited for in the next step.
#[cube]
#[allow(clippy::too_many_arguments)]
fn advance(
    state: &mut KeyState,
    q_ring: &mut Ring,
    g_ring: &mut Ring,
    statistics: &mut Statistics,
    source: &Source,
    at: &Operands,
    q: &TensorMap<bf16, Tiled>,
    out_gradient: &TensorMap<bf16, Tiled>,
    lse: &[f32],
    delta: &[f32],
    step: u32,
    scale_log2: f32,
    edge: bool,
    seen_from: i32,
    #[comptime] plan: KeyGradientPlan,
) {
    let (block, d) = (plan.block, plan.head_dim);
    let slot = tile::slot(step, plan.stages);
    let offset = tile::offset(&slot, block, d);
    let column = slot.stage * block + ((UNIT_POS % 4) * 2) as usize;

    tile::arrived(q_ring, &slot);
    tile::issue_scores(&mut state.scores, at.k, at.q + offset, block, d);
    tile::arrived(g_ring, &slot);
    if comptime![plan.early] {
        tile::issue_scores(&mut state.slopes, at.v, at.out_gradient + offset, block, d);
        mma::wait(1usize);
    } else {
        mma::wait(0usize);
    }
    mma::pin(&mut state.scores);
    tile::pin_operand(&mut state.weights, block);
    tile::pin_operand(&mut state.operand, block);
    if comptime![!plan.early] {
        tile::issue_scores(&mut state.slopes, at.v, at.out_gradient + offset, block, d);
    }
    if step > 0 {
        // The products of the step before are done too, and with them that step's tiles.
        let before = tile::slot(step - 1, plan.stages);
        tile::release(q_ring, &before);
        tile::release(g_ring, &before);
    }
    if UNIT_POS == 0 {
        let next = step + comptime![plan.stages as u32 - 1];
        if next < source.total {
            load(q_ring, g_ring, statistics, q, out_gradient, lse, delta, source, next, plan);
        }
    }
    if edge {
        #[unroll]
        for i in 0..comptime![block / 2] {
            // Column of this score, less the eight rows that the second row is further down.
            let query = comptime![(8 * (i / 4) + i % 2) as i32 - 8 * ((i / 2) % 2) as i32];
            state.scores[i] = select(query >= seen_from, state.scores[i], HIDDEN);
        }
    }
    #[unroll]
    for i in 0..comptime![block / 8] {
        #[unroll]
        for j in 0..2usize {
            let shift = -statistics.lse[column + comptime![8 * i + j]] * LOG2_E;
            #[unroll]
            for half in 0..2usize {
                let index = comptime![4 * i + 2 * half + j];
                state.scores[index] = ptx::exp2(fma(state.scores[index], scale_log2, shift));
            }
        }
    }
    tile::pack_operand(&mut state.weights, &state.scores, block);
    tile::issue_product(&mut state.v_sum, &mut state.weights, at.out_gradient_columns + offset, block, d);
    mma::wait(1usize);
    mma::pin(&mut state.slopes);
    #[unroll]
    for i in 0..comptime![block / 8] {
        #[unroll]
        for j in 0..2usize {
            let delta = statistics.delta[column + comptime![8 * i + j]];
            #[unroll]
            for half in 0..2usize {
                let index = comptime![4 * i + 2 * half + j];
                state.slopes[index] = state.scores[index] * (state.slopes[index] - delta);
            }
        }
    }
    tile::pack_operand(&mut state.operand, &state.slopes, block);
    tile::issue_product(&mut state.k_sum, &mut state.operand, at.q_columns + offset, block, d);
}
