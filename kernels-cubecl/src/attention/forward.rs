//! The forward kernel: two warpgroups of 64 query rows each; one of their units also drives the copy engine.
//!
//! A third warpgroup for the copies would leave each unit 168 registers: CubeCL has the driver link its kernels, and in
//! that mode `setmaxnreg` is ignored.
use super::tile::{self, HIDDEN, Ring};
use crate::hopper::mma::{self, Pair};
use crate::hopper::ptx;
use crate::hopper::ring::barrier_at;
use crate::tiling::{KeyBlocks, QUERY_ROWS};
use cubecl::prelude::*;
use half::bf16;

/// What is fixed when the forward kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ForwardPlan {
    /// Length of a query, key and value.
    pub head_dim: usize,
    /// Keys per step.
    pub block: usize,
    /// Key and value tiles in flight.
    pub stages: usize,
    /// Query i sees the keys up to i, the last query the last key.
    pub causal: bool,
    /// The product with the values runs under the exponentials of the next scores.
    pub overlap: bool,
    /// The two warpgroups take turns at the tensor cores, so that one computes exponentials while the other multiplies.
    pub turns: bool,
}

impl ForwardPlan {
    /// What was fastest on an H200 (8192 queries and keys, 32 and 8 heads).
    pub fn fastest(head_dim: usize, causal: bool) -> Self {
        match (head_dim, causal) {
            // Small enough for two cubes on a multiprocessor.
            (64, _) => Self { head_dim, block: 80, stages: 2, causal, overlap: false, turns: false },
            (_, true) => Self { head_dim, block: 160, stages: 2, causal, overlap: true, turns: true },
            (_, false) => Self { head_dim, block: 176, stages: 2, causal, overlap: true, turns: true },
        }
    }
}

/// Hardware barriers of the turns of the two warpgroups.
const FIRST_TURN: u32 = 2;
const SECOND_TURN: u32 = 3;
const LN_2: f32 = core::f32::consts::LN_2;

/// `out = softmax(q kᵀ · scale) v` for 128 query rows of one head; `lse` gets the natural logarithm of the sum of
/// exponentials. 256 units; cube `(head, batch, block)`; tensor maps as `attention::map` makes them, with boxes of 64
/// rows (`q`), `block` rows (`k`, `v`), and 16 rows of 64 columns (`out`).
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn forward(
    q: &TensorMap<bf16, Tiled>,
    k: &TensorMap<bf16, Tiled>,
    v: &TensorMap<bf16, Tiled>,
    out: &mut TensorMap<bf16, Tiled>,
    lse: &mut [f32],
    queries: u32,
    keys: u32,
    statistics_stride: u32,
    group: u32,
    scale_log2: f32,
    #[comptime] plan: ForwardPlan,
) {
    let d = comptime![plan.head_dim];
    let block = comptime![plan.block];
    let q_tile = comptime![mma::ROWS * d / 2];

    let mut q_smem = Shared::<[Pair]>::new_aligned_slice(comptime![2 * q_tile], 1024usize);
    let q_full = Shared::<[u64]>::new_slice(1usize);
    if UNIT_POS == 0 {
        barrier_at(&q_full, 0usize).init_manual(1);
    }
    let mut k_ring = tile::ring(plan.stages, block, d);
    let mut v_ring = tile::ring(plan.stages, block, d);
    sync_async_proxy_shared();
    sync_cube();

    let head = CUBE_POS_X;
    let batch = CUBE_POS_Y;
    // Causal rows further down have more work: they start first.
    let rows = comptime![QUERY_ROWS as u32];
    let row_block = if comptime![plan.causal] { (queries - 1) / rows - CUBE_POS_Z } else { CUBE_POS_Z };
    let first_row = row_block * rows;
    let blocks = KeyBlocks::new(first_row, queries, keys, comptime![block as u32], comptime![plan.causal]);
    let source = Source { batch: batch as i32, head: (head / group) as i32, count: blocks.count };
    let role = plane_broadcast(UNIT_POS / 128, 0u32);
    if UNIT_POS == 0 {
        let full = barrier_at(&q_full, 0usize);
        full.arrive_and_expect_tx(1, comptime![(4 * 2 * q_tile) as u32]);
        #[unroll]
        for wg in 0..2usize {
            let row = first_row as i32 + comptime![(wg * mma::ROWS) as i32];
            let tile = q_smem.slice_mut(comptime![wg * q_tile], comptime![(wg + 1) * q_tile]);
            full.tma_load_5d(q, tile, source.batch, head as i32, 0, row, 0);
        }
        load(&mut k_ring, k, &source, 0u32, plan);
        load(&mut v_ring, v, &source, 0u32, plan);
        if blocks.count > 1 {
            load(&mut k_ring, k, &source, 1u32, plan);
        }
    }

    let lane = UNIT_POS % 32;
    let row = first_row + role * 64 + ((UNIT_POS / 32) % 4) * 16 + lane / 4;
    let place = Place { role, row, column: (lane % 4) * 2, queries, keys };
    let own = role as usize * q_tile;
    let at = Operands {
        q: mma::descriptor(q_smem.slice(own, own + q_tile), comptime![mma::k_major(mma::ROWS, d)]),
        k: mma::descriptor(k_ring.tiles.as_slice(), comptime![mma::k_major(block, d)]),
        v: mma::descriptor(v_ring.tiles.as_slice(), comptime![mma::mn_major(d, block)]),
    };

    let mut state = RowState {
        scores: Array::new(comptime![block / 2]),
        sum: Array::new(comptime![d / 2]),
        weights: tile::operand(block),
        top: Array::new(2usize),
        total: Array::new(2usize),
        factor: Array::new(2usize),
    };
    mma::fill(&mut state.sum, 0.0, comptime![d / 2]);
    mma::fill(&mut state.top, HIDDEN, 2usize);
    mma::fill(&mut state.total, 0.0, 2usize);

    // The first block has no predecessor whose product with the values could run under its softmax.
    let first = tile::slot(0u32, plan.stages);
    barrier_at(&q_full, 0usize).wait_parity(0);
    tile::arrived(&mut k_ring, &first);
    tile::issue_scores(&mut state.scores, at.q, at.k, block, d);
    mma::wait(0usize);
    mma::pin(&mut state.scores);
    tile::release(&mut k_ring, &first);
    let last = (blocks.count - 1) * comptime![block as u32];
    tile::hide(&mut state.scores, row, queries, keys, last + place.column, block, plan.causal);
    softmax(&mut state, scale_log2, plan);
    tile::pack_operand(&mut state.weights, &state.scores, block);

    if comptime![plan.turns] {
        if role == 1 {
            ptx::named_barrier_arrive(FIRST_TURN, 256u32);
        }
    }
    for step in 1..blocks.edge {
        advance(&mut state, &mut k_ring, &mut v_ring, &place, &source, &at, k, v, step, scale_log2, true, plan);
    }
    for step in u32::max(1, blocks.edge)..blocks.count {
        advance(&mut state, &mut k_ring, &mut v_ring, &place, &source, &at, k, v, step, scale_log2, false, plan);
    }
    let slot = tile::slot(blocks.count - 1, plan.stages);
    tile::arrived(&mut v_ring, &slot);
    tile::issue_product(&mut state.sum, &mut state.weights, at.v + tile::offset(&slot, block, d), block, d);
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
        state.factor[half] = ptx::reciprocal(sum);
        let at = row + comptime![(half * 8) as u32];
        if lane % 4 == 0 && at < statistics_stride {
            let value = (state.top[half] * scale_log2 + ptx::log2(sum)) * LN_2;
            lse[((batch * CUBE_COUNT_X + head) * statistics_stride + at) as usize] = value;
        }
    }
    mma::wait(0usize);
    mma::pin(&mut state.sum);
    // The query tile is no longer needed and takes the output.
    let tile = q_smem.slice_mut(own, own + q_tile);
    tile::store(&state.sum, &state.factor, tile, out, batch as i32, head as i32, first_row + role * 64, d);
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
    /// The warpgroup, 0 or 1.
    role: u32,
    row: u32,
    column: u32,
    queries: u32,
    keys: u32,
}

/// Descriptors of the warpgroup's queries and of the first key and value tile.
#[derive(CubeType)]
struct Operands {
    q: u64,
    k: u64,
    v: u64,
}

/// What a unit holds of its warpgroup's 64 rows: two rows, of each every fourth pair of columns.
#[derive(CubeType)]
struct RowState {
    /// Scores, then their exponentials.
    scores: Array<f32>,
    /// The output so far, not yet divided by `total`.
    sum: Array<f32>,
    /// The exponentials in bf16: the left operand of the product with the values.
    weights: Sequence<Array<u32>>,
    /// Greatest score of each row.
    top: Array<f32>,
    /// This unit's part of each row's sum of exponentials.
    total: Array<f32>,
    /// What the last softmax asks the output so far to be multiplied with.
    factor: Array<f32>,
}

/// Starts the copy of the tile of step `step`.
#[cube]
fn load(ring: &mut Ring, map: &TensorMap<bf16, Tiled>, source: &Source, step: u32, #[comptime] plan: ForwardPlan) {
    let row = ((source.count - 1 - step) * comptime![plan.block as u32]) as i32;
    let slot = tile::slot(step, plan.stages);
    tile::load(ring, &slot, map, source.batch, source.head, row, 0u32, plan.block, plan.head_dim);
}

/// Step `step`: the scores of its key block, under whose softmax runs the product of the block before with its values.
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
    #[comptime] plan: ForwardPlan,
) {
    let (block, d) = (plan.block, plan.head_dim);
    let k_slot = tile::slot(step, plan.stages);
    let v_slot = tile::slot(step - 1, plan.stages);

    tile::arrived(k_ring, &k_slot);
    if comptime![plan.turns] {
        if place.role == 0 {
            ptx::named_barrier_sync(FIRST_TURN, 256u32);
        } else {
            ptx::named_barrier_sync(SECOND_TURN, 256u32);
        }
    }
    tile::issue_scores(&mut state.scores, at.q, at.k + tile::offset(&k_slot, block, d), block, d);
    tile::arrived(v_ring, &v_slot);
    tile::issue_product(&mut state.sum, &mut state.weights, at.v + tile::offset(&v_slot, block, d), block, d);
    if comptime![plan.turns] {
        if place.role == 0 {
            ptx::named_barrier_arrive(SECOND_TURN, 256u32);
        } else {
            ptx::named_barrier_arrive(FIRST_TURN, 256u32);
        }
    }
    if UNIT_POS == 0 {
        // With three stages, what these tiles replace was last read two steps ago.
        if step + 1 < source.count {
            load(k_ring, k, source, step + 1, plan);
        }
        load(v_ring, v, source, step, plan);
    }
    mma::wait(1usize);
    mma::pin(&mut state.scores);
    tile::release(k_ring, &k_slot);
    if comptime![edge] {
        let first = (source.count - 1 - step) * comptime![plan.block as u32];
        tile::hide(&mut state.scores, place.row, place.queries, place.keys, first + place.column, block, plan.causal);
    }
    softmax(state, scale_log2, plan);
    if comptime![plan.overlap] {
        // The assembler moves the exponentials behind the wait unless a branch that needs them stands between.
        if plane_any(state.total[0] + state.total[1] < 0.0) {
            ptx::trap();
        }
    }
    mma::wait(0usize);
    mma::pin(&mut state.sum);
    tile::release(v_ring, &v_slot);
    #[unroll]
    for i in 0..comptime![plan.head_dim / 2] {
        state.sum[i] = state.sum[i] * state.factor[comptime![(i / 2) % 2]];
    }
    tile::pack_operand(&mut state.weights, &state.scores, block);
}

/// One step of the online softmax: `scores` become exponentials over the greatest score so far.
#[cube]
fn softmax(state: &mut RowState, scale_log2: f32, #[comptime] plan: ForwardPlan) {
    #[unroll]
    for half in 0..2usize {
        let before = state.top[half];
        let mut top = before;
        #[unroll]
        for i in 0..comptime![plan.block / 4] {
            top = max(top, state.scores[comptime![(i / 2) * 4 + half * 2 + i % 2]]);
        }
        top = max(top, plane_shuffle_xor(top, 1u32));
        top = max(top, plane_shuffle_xor(top, 2u32));
        state.top[half] = top;
        let factor = ptx::exp2((before - top) * scale_log2);
        // While a row has seen no key all its exponentials are zero.
        let shift = select(top == HIDDEN, 0.0, -top * scale_log2);
        let mut total = state.total[half] * factor;
        #[unroll]
        for i in 0..comptime![plan.block / 4] {
            let index = comptime![(i / 2) * 4 + half * 2 + i % 2];
            let weight = ptx::exp2(fma(state.scores[index], scale_log2, shift));
            state.scores[index] = weight;
            total += weight;
        }
        state.total[half] = total;
        state.factor[half] = factor;
    }
}
