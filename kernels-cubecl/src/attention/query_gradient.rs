//! The gradient of the queries: like the forward kernel, 128 query rows a cube, over the key blocks they see.
use super::tile::{self, Ring};
use crate::hopper::mma::{self, Pair};
use crate::hopper::ptx;
use crate::hopper::ring::barrier_at;
use crate::tiling::{KeyBlocks, QUERY_ROWS};
use cubecl::prelude::*;
use half::bf16;

/// What is fixed when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueryGradientPlan {
    /// Length of a query, key and value.
    pub head_dim: usize,
    /// Keys per step.
    pub block: usize,
    /// Key and value tiles in flight.
    pub stages: usize,
    /// Query i sees the keys up to i, the last query the last key.
    pub causal: bool,
}

impl QueryGradientPlan {
    /// What was fastest on an H200 (8192 queries and keys, 32 and 8 heads).
    pub fn fastest(head_dim: usize, causal: bool) -> Self {
        Self { head_dim, block: 112, stages: 2, causal }
    }
}

const LOG2_E: f32 = core::f32::consts::LOG2_E;

/// `q_gradient = scale · dS k` with `dS = P ∘ (out_gradient vᵀ - delta)` and `P = exp(q kᵀ · scale - lse)`. 256 units;
/// cube `(head, batch, block)`; boxes of 64 rows (`q`, `out_gradient`), `block` rows (`k`, `v`) and 16 rows of 64
/// columns (`q_gradient`).
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn query_gradient(
    q: &TensorMap<bf16, Tiled>,
    k: &TensorMap<bf16, Tiled>,
    v: &TensorMap<bf16, Tiled>,
    out_gradient: &TensorMap<bf16, Tiled>,
    lse: &[f32],
    delta: &[f32],
    q_gradient: &mut TensorMap<bf16, Tiled>,
    queries: u32,
    keys: u32,
    statistics_stride: u32,
    group: u32,
    scale: f32,
    #[comptime] plan: QueryGradientPlan,
) {
    let d = comptime![plan.head_dim];
    let block = comptime![plan.block];
    let q_tile = comptime![mma::ROWS * d / 2];

    let mut q_smem = Shared::<[Pair]>::new_aligned_slice(comptime![2 * q_tile], 1024usize);
    let mut g_smem = Shared::<[Pair]>::new_aligned_slice(comptime![2 * q_tile], 1024usize);
    let fixed = Shared::<[u64]>::new_slice(1usize);
    if UNIT_POS == 0 {
        barrier_at(&fixed, 0usize).init_manual(1);
    }
    let mut k_ring = tile::ring(plan.stages, block, d);
    let mut v_ring = tile::ring(plan.stages, block, d);
    sync_async_proxy_shared();
    sync_cube();

    let head = CUBE_POS_X;
    let batch = CUBE_POS_Y;
    let rows = comptime![QUERY_ROWS as u32];
    // Causal rows further down have more work: they start first.
    let row_block = if comptime![plan.causal] { (queries - 1) / rows - CUBE_POS_Z } else { CUBE_POS_Z };
    let first_row = row_block * rows;
    let blocks = KeyBlocks::new(first_row, queries, keys, comptime![block as u32], comptime![plan.causal]);
    let source = Source { batch: batch as i32, head: (head / group) as i32, count: blocks.count };
    let role = plane_broadcast(UNIT_POS / 128, 0u32);
    if UNIT_POS == 0 {
        let full = barrier_at(&fixed, 0usize);
        full.arrive_and_expect_tx(1, comptime![(4 * 4 * q_tile) as u32]);
        #[unroll]
        for wg in 0..2usize {
            let row = first_row as i32 + comptime![(wg * mma::ROWS) as i32];
            let (from, to) = comptime![(wg * q_tile, (wg + 1) * q_tile)];
            full.tma_load_5d(q, q_smem.slice_mut(from, to), source.batch, head as i32, 0, row, 0);
            full.tma_load_5d(out_gradient, g_smem.slice_mut(from, to), source.batch, head as i32, 0, row, 0);
        }
        // All but one stage; the steps keep that distance.
        for step in 0..u32::min(blocks.count, comptime![plan.stages as u32 - 1]) {
            load(&mut k_ring, k, &source, step, plan);
            load(&mut v_ring, v, &source, step, plan);
        }
    }

    let lane = UNIT_POS % 32;
    let row = first_row + role * 64 + ((UNIT_POS / 32) % 4) * 16 + lane / 4;
    let own = role as usize * q_tile;
    let at = Operands {
        q: mma::descriptor(q_smem.slice(own, own + q_tile), comptime![mma::k_major(mma::ROWS, d)]),
        out_gradient: mma::descriptor(g_smem.slice(own, own + q_tile), comptime![mma::k_major(mma::ROWS, d)]),
        k: mma::descriptor(k_ring.tiles.as_slice(), comptime![mma::k_major(block, d)]),
        k_columns: mma::descriptor(k_ring.tiles.as_slice(), comptime![mma::mn_major(d, block)]),
        v: mma::descriptor(v_ring.tiles.as_slice(), comptime![mma::k_major(block, d)]),
    };
    let mut state = RowState {
        scores: Array::new(comptime![block / 2]),
        slopes: Array::new(comptime![block / 2]),
        operand: tile::operand(block),
        sum: Array::new(comptime![d / 2]),
        shift: Array::new(2usize),
        delta: Array::new(2usize),
    };
    mma::fill(&mut state.sum, 0.0, comptime![d / 2]);
    #[unroll]
    for half in 0..2usize {
        let index = (batch * CUBE_COUNT_X + head) * statistics_stride + row + comptime![(half * 8) as u32];
        state.shift[half] = -lse[index as usize] * LOG2_E;
        state.delta[half] = delta[index as usize];
    }
    let scale_log2 = scale * LOG2_E;
    let place = Place { row, column: (lane % 4) * 2, queries, keys };

    barrier_at(&fixed, 0usize).wait_parity(0);
    for step in 0..blocks.edge {
        advance(&mut state, &mut k_ring, &mut v_ring, &place, &source, &at, k, v, step, scale_log2, true, plan);
    }
    for step in blocks.edge..blocks.count {
        advance(&mut state, &mut k_ring, &mut v_ring, &place, &source, &at, k, v, step, scale_log2, false, plan);
    }
    mma::wait(0usize);
    mma::pin(&mut state.sum);
    mma::fill(&mut state.shift, scale, 2usize);
    // The query tile is no longer needed and takes the gradient.
    let tile = q_smem.slice_mut(own, own + q_tile);
    tile::store(&state.sum, &state.shift, tile, q_gradient, batch as i32, head as i32, first_row + role * 64, d);
}

/// Which keys and values a cube reads.
#[derive(CubeType)]
struct Source {
    batch: i32,
    head: i32,
    /// Blocks of them, read from the last to the first.
    count: u32,
}

/// Where a unit's scores lie.
#[derive(CubeType)]
struct Place {
    row: u32,
    column: u32,
    queries: u32,
    keys: u32,
}

/// Descriptors of the warpgroup's rows and of the first key and value tile; the keys also as columns to sum over.
#[derive(CubeType)]
struct Operands {
    q: u64,
    out_gradient: u64,
    k: u64,
    k_columns: u64,
    v: u64,
}

/// What a unit holds of its warpgroup's 64 rows: two rows, of each every fourth pair of columns.
#[derive(CubeType)]
struct RowState {
    /// Scores, then probabilities.
    scores: Array<f32>,
    /// Gradients of the probabilities, then of the scores.
    slopes: Array<f32>,
    /// The gradients of the scores in bf16.
    operand: Sequence<Array<u32>>,
    /// The gradient of the queries so far, not yet scaled.
    sum: Array<f32>,
    /// `-lse` in powers of two.
    shift: Array<f32>,
    delta: Array<f32>,
}

/// Starts the copy of the tile of step `step`.
#[cube]
fn load(
    ring: &mut Ring,
    map: &TensorMap<bf16, Tiled>,
    source: &Source,
    step: u32,
    #[comptime] plan: QueryGradientPlan,
) {
    let row = ((source.count - 1 - step) * comptime![plan.block as u32]) as i32;
    let slot = tile::slot(step, plan.stages);
    tile::load(ring, &slot, map, source.batch, source.head, row, 0u32, plan.block, plan.head_dim);
}

/// One key block. Its last product still runs when this returns, and is waited for in the next step.
#[cube]
#[allow(clippy::too_many_arguments)]
fn advance(
    state: &mut RowState,
    k_ring: &mut Ring,
    v_ring: &mut Ring,
    place: &Place,
    source: &Source,
    at: &Operands,
    k: &TensorMap<bf16, Tiled>,
    v: &TensorMap<bf16, Tiled>,
    step: u32,
    scale_log2: f32,
    #[comptime] edge: bool,
    #[comptime] plan: QueryGradientPlan,
) {
    let (block, d) = (plan.block, plan.head_dim);
    let slot = tile::slot(step, plan.stages);
    let offset = tile::offset(&slot, block, d);

    tile::arrived(k_ring, &slot);
    tile::issue_scores(&mut state.scores, at.q, at.k + offset, block, d);
    tile::arrived(v_ring, &slot);
    tile::issue_scores(&mut state.slopes, at.out_gradient, at.v + offset, block, d);
    mma::wait(1usize);
    mma::pin(&mut state.scores);
    tile::pin_operand(&mut state.operand, block);
    if step > 0 {
        // The product of the step before is done too, and with it that step's keys.
        let before = tile::slot(step - 1, plan.stages);
        tile::release(k_ring, &before);
    }
    if UNIT_POS == 0 {
        let next = step + comptime![plan.stages as u32 - 1];
        if next < source.count {
            load(k_ring, k, source, next, plan);
            load(v_ring, v, source, next, plan);
        }
    }
    if comptime![edge] {
        let first = (source.count - 1 - step) * comptime![plan.block as u32];
        tile::hide(&mut state.scores, place.row, place.queries, place.keys, first + place.column, block, plan.causal);
    }
    #[unroll]
    for i in 0..comptime![block / 2] {
        let shift = state.shift[comptime![(i / 2) % 2]];
        state.scores[i] = ptx::exp2(fma(state.scores[i], scale_log2, shift));
    }
    mma::wait(0usize);
    mma::pin(&mut state.slopes);
    tile::release(v_ring, &slot);
    #[unroll]
    for i in 0..comptime![block / 2] {
        state.slopes[i] = state.scores[i] * (state.slopes[i] - state.delta[comptime![(i / 2) % 2]]);
    }
    tile::pack_operand(&mut state.operand, &state.slopes, block);
    tile::issue_product(&mut state.sum, &mut state.operand, at.k_columns + offset, block, d);
}
