//! The forward kernel: two warpgroups of 64 query rows each; one of their units also drives the copy engine.
//!
//! A third warpgroup for the copies would leave each unit 168 registers: CubeCL has the driver link its kernels, and in
//! that mode `setmaxnreg` is ignored.
use crate::hopper::mma::{self, PANEL, Pair, STEP};
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
    /// Units per cube: two warpgroups.
    pub const UNITS: u32 = 256;
}

/// A score no query sees: finite, so that a block without any visible key does no harm.
const HIDDEN: f32 = -1.0e30;
const LN_2: f32 = core::f32::consts::LN_2;

/// `out = softmax(q kᵀ · scale) v` for 128 query rows of one head; `lse` gets the natural logarithm of the sum of
/// exponentials. Cube `(head, batch, block)`; tensor maps as `attention::map` makes them, with boxes of 64
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
    let panels = comptime![d / PANEL];
    let block = comptime![plan.block];
    let stages = comptime![plan.stages];
    let q_layout = comptime![mma::k_major(mma::ROWS, d)];
    let k_layout = comptime![mma::k_major(block, d)];
    let v_layout = comptime![mma::mn_major(d, block)];
    let q_tile = comptime![mma::ROWS * d / 2];
    let q_panel = comptime![mma::ROWS * PANEL / 2];
    let kv_tile = comptime![block * d / 2];
    let kv_panel = comptime![block * PANEL / 2];

    let mut q_smem = Shared::<[Pair]>::new_aligned_slice(comptime![2 * q_tile], 1024usize);
    let mut k_smem = Shared::<[Pair]>::new_aligned_slice(comptime![stages * kv_tile], 1024usize);
    let mut v_smem = Shared::<[Pair]>::new_aligned_slice(comptime![stages * kv_tile], 1024usize);
    let q_full = Shared::<[u64]>::new_slice(1usize);
    let k_full = Shared::<[u64]>::new_slice(stages);
    let k_free = Shared::<[u64]>::new_slice(stages);
    let v_full = Shared::<[u64]>::new_slice(stages);
    let v_free = Shared::<[u64]>::new_slice(stages);
    if UNIT_POS == 0 {
        barrier_at(&q_full, 0usize).init_manual(1);
        #[unroll]
        for s in 0..stages {
            barrier_at(&k_full, s).init_manual(1);
            barrier_at(&v_full, s).init_manual(1);
            // One arrival per consuming plane.
            barrier_at(&k_free, s).init_manual(8);
            barrier_at(&v_free, s).init_manual(8);
        }
    }
    sync_async_proxy_shared();
    sync_cube();

    let head = CUBE_POS_X;
    let batch = CUBE_POS_Y;
    // Causal rows further down have more work: they start first.
    let rows = comptime![QUERY_ROWS as u32];
    let row_block = if comptime![plan.causal] { (queries - 1) / rows - CUBE_POS_Z } else { CUBE_POS_Z };
    let first_row = row_block * rows;
    let blocks = KeyBlocks::new(first_row, queries, keys, comptime![block as u32], comptime![plan.causal]);
    let role = plane_broadcast(UNIT_POS / 128, 0u32);

    let at = Tiles { batch: batch as i32, head: (head / group) as i32, count: blocks.count };
    let pipes = Pipes { k_full, k_free, v_full, v_free };
    if UNIT_POS == 0 {
        let full = barrier_at(&q_full, 0usize);
        full.arrive_and_expect_tx(1, comptime![(4 * 2 * q_tile) as u32]);
        #[unroll]
        for wg in 0..2usize {
            let row = first_row as i32 + comptime![(wg * mma::ROWS) as i32];
            let tile = q_smem.slice_mut(comptime![wg * q_tile], comptime![(wg + 1) * q_tile]);
            full.tma_load_5d(q, tile, at.batch, head as i32, 0, row, 0);
        }
        load(&pipes.k_full, &pipes.k_free, k, &mut k_smem, &at, 0u32, plan);
        load(&pipes.v_full, &pipes.v_free, v, &mut v_smem, &at, 0u32, plan);
        if blocks.count > 1 {
            load(&pipes.k_full, &pipes.k_free, k, &mut k_smem, &at, 1u32, plan);
        }
    }
    let lane = UNIT_POS % 32;
    let plane = (UNIT_POS / 32) % 4;
    let tile_row = plane * 16 + lane / 4;
    let row = first_row + role * 64 + tile_row;
    let column = (lane % 4) * 2;
    let q_at = mma::descriptor(q_smem.as_slice(), q_layout)
        + role as u64 * comptime![(q_tile * 4 / 16) as u64];
    let k_at = mma::descriptor(k_smem.as_slice(), k_layout);
    let v_at = mma::descriptor(v_smem.as_slice(), v_layout);

    let mut state = RowState {
        scores: Array::new(comptime![block / 2]),
        sum: Array::new(comptime![d / 2]),
        weights: Sequence::new(),
        top: Array::new(2usize),
        total: Array::new(2usize),
        factor: Array::new(2usize),
    };
    #[unroll]
    for _ in 0..comptime![block / STEP] {
        state.weights.push(Array::<u32>::new(4usize));
    }
    mma::fill(&mut state.sum, 0.0, comptime![d / 2]);
    mma::fill(&mut state.top, HIDDEN, 2usize);
    mma::fill(&mut state.total, 0.0, 2usize);

    // The first block has no predecessor whose product with the values could run under its softmax.
    barrier_at(&q_full, 0usize).wait_parity(0);
    barrier_at(&pipes.k_full, 0usize).wait_parity(0);
    issue_scores(&mut state.scores, q_at, k_at, plan);
    mma::wait(0usize);
    mma::pin(&mut state.scores);
    if lane == 0 {
        barrier_at(&pipes.k_free, 0usize).arrive();
    }
    let last = (blocks.count - 1) * comptime![block as u32];
    hide(&mut state.scores, row, queries, keys, last + column, plan);
    softmax(&mut state, scale_log2, plan);
    pack_weights(&mut state, plan);

    if comptime![plan.turns] {
        if role == 1 {
            // The first turn is the first warpgroup's.
            ptx::named_barrier_arrive(2u32, 256u32);
        }
    }
    let place = Place { role, row, column, queries, keys };
    for step in 1..blocks.edge {
        advance(
            &mut state, &pipes, &place, &at, k, v, &mut k_smem, &mut v_smem, step, q_at, k_at, v_at, scale_log2, true, plan,
        );
    }
    for step in u32::max(1, blocks.edge)..blocks.count {
        advance(
            &mut state, &pipes, &place, &at, k, v, &mut k_smem, &mut v_smem, step, q_at, k_at, v_at, scale_log2, false, plan,
        );
    }
    let before = blocks.count - 1;
    let v_stage = (before % comptime![stages as u32]) as usize;
    barrier_at(&pipes.v_full, v_stage).wait_parity((before / comptime![stages as u32]) % 2);
    issue_values(&mut state, v_at + v_stage as u64 * comptime![(kv_tile * 4 / 16) as u64], plan);
    // The other warpgroup may still wait for a turn that this one gives when it has none left itself.
    if comptime![plan.turns] {
        if role == 0 {
            ptx::named_barrier_sync(2u32, 256u32);
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
    // Each plane's 16 rows of the query tile are free once its MMAs are done, and hold its output rows.
    let own = role as usize * q_tile;
    #[unroll]
    for i in 0..comptime![d / 4] {
        let half = comptime![i % 2];
        let scale = state.factor[half];
        let pair = mma::pack(state.sum[2 * i] * scale, state.sum[2 * i + 1] * scale);
        let line = tile_row as usize + comptime![half * 8];
        let along = comptime![(i / 2) * 8] + column as usize;
        q_smem[own + q_layout.offset(line, along, 2usize) / 2] = Pair::reinterpret(pair);
    }
    sync_async_proxy_shared();
    sync_plane();
    if lane == 0 {
        let at_row = (first_row + role * 64 + plane * 16) as i32;
        #[unroll]
        for p in 0..panels {
            let from = own + comptime![p * q_panel] + plane as usize * comptime![16 * PANEL / 2];
            let tile = q_smem.slice(from, from + comptime![16 * PANEL / 2]);
            let stored = tma_store_5d(tile, out, batch as i32, head as i32, comptime![p as i32], at_row, 0);
            stored.wait();
        }
    }
}

/// The barriers of the key and value tiles.
#[derive(CubeType)]
struct Pipes {
    k_full: Shared<[u64]>,
    k_free: Shared<[u64]>,
    v_full: Shared<[u64]>,
    v_free: Shared<[u64]>,
}

/// Which keys and values a cube reads.
#[derive(CubeType)]
struct Tiles {
    batch: i32,
    head: i32,
    /// Blocks of them, read from the last to the first.
    count: u32,
}

/// Has the copy engine bring the tile of step `step`, once the one it replaces has been read.
#[cube]
fn load(
    full: &[u64],
    free: &[u64],
    source: &TensorMap<bf16, Tiled>,
    tiles: &mut [Pair],
    at: &Tiles,
    step: u32,
    #[comptime] plan: ForwardPlan,
) {
    let stages = comptime![plan.stages as u32];
    let tile = comptime![plan.block * plan.head_dim / 2];
    let stage = (step % stages) as usize;
    barrier_at(free, stage).wait_parity((step / stages) % 2 ^ 1);
    let full = barrier_at(full, stage);
    full.arrive_and_expect_tx(1, comptime![(4 * tile) as u32]);
    let row = ((at.count - 1 - step) * comptime![plan.block as u32]) as i32;
    full.tma_load_5d(source, tiles.slice_mut(stage * tile, (stage + 1) * tile), at.batch, at.head, 0, row, 0);
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

/// Step `step`: the scores of its key block, under whose softmax runs the product of the block before with its values.
#[cube]
#[allow(clippy::too_many_arguments)]
fn advance(
    state: &mut RowState,
    pipes: &Pipes,
    place: &Place,
    at: &Tiles,
    k: &TensorMap<bf16, Tiled>,
    v: &TensorMap<bf16, Tiled>,
    k_smem: &mut [Pair],
    v_smem: &mut [Pair],
    step: u32,
    q_at: u64,
    k_at: u64,
    v_at: u64,
    scale_log2: f32,
    #[comptime] edge: bool,
    #[comptime] plan: ForwardPlan,
) {
    let stages = comptime![plan.stages as u32];
    let tile_units = comptime![(plan.block * plan.head_dim * 2 / 16) as u64];
    let before = step - 1;
    let stage = (step % stages) as usize;
    let v_stage = (before % stages) as usize;

    barrier_at(&pipes.k_full, stage).wait_parity((step / stages) % 2);
    if comptime![plan.turns] {
        if place.role == 0 {
            ptx::named_barrier_sync(2u32, 256u32);
        } else {
            ptx::named_barrier_sync(3u32, 256u32);
        }
    }
    issue_scores(&mut state.scores, q_at, k_at + stage as u64 * tile_units, plan);
    barrier_at(&pipes.v_full, v_stage).wait_parity((before / stages) % 2);
    issue_values(state, v_at + v_stage as u64 * tile_units, plan);
    if comptime![plan.turns] {
        if place.role == 0 {
            ptx::named_barrier_arrive(3u32, 256u32);
        } else {
            ptx::named_barrier_arrive(2u32, 256u32);
        }
    }
    if UNIT_POS == 0 {
        // Three stages: what these tiles replace was last read two steps ago.
        if step + 1 < at.count {
            load(&pipes.k_full, &pipes.k_free, k, k_smem, at, step + 1, plan);
        }
        load(&pipes.v_full, &pipes.v_free, v, v_smem, at, step, plan);
    }
    mma::wait(1usize);
    mma::pin(&mut state.scores);
    if UNIT_POS % 32 == 0 {
        barrier_at(&pipes.k_free, stage).arrive();
    }
    if comptime![edge] {
        let first = (at.count - 1 - step) * comptime![plan.block as u32];
        hide(&mut state.scores, place.row, place.queries, place.keys, first + place.column, plan);
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
    if UNIT_POS % 32 == 0 {
        barrier_at(&pipes.v_free, v_stage).arrive();
    }
    #[unroll]
    for i in 0..comptime![plan.head_dim / 2] {
        state.sum[i] = state.sum[i] * state.factor[comptime![(i / 2) % 2]];
    }
    pack_weights(state, plan);
}

/// What a unit holds of its warpgroup's 64 rows: two rows, of each every fourth pair of columns.
#[derive(CubeType)]
struct RowState {
    /// Scores, then their exponentials.
    scores: Array<f32>,
    /// The output so far, not yet divided by `total`.
    sum: Array<f32>,
    /// The exponentials in bf16, sixteen columns an array: the left operand of the product with the values.
    weights: Sequence<Array<u32>>,
    /// Greatest score of each row.
    top: Array<f32>,
    /// This unit's part of each row's sum of exponentials.
    total: Array<f32>,
    /// What the last softmax asks the output so far to be multiplied with.
    factor: Array<f32>,
}

/// Starts `scores = q kᵀ` as one group.
#[cube]
fn issue_scores(scores: &mut Array<f32>, q: u64, k: u64, #[comptime] plan: ForwardPlan) {
    let q_layout = comptime![mma::k_major(mma::ROWS, plan.head_dim)];
    let k_layout = comptime![mma::k_major(plan.block, plan.head_dim)];
    mma::fill(scores, 0.0, comptime![plan.block / 2]);
    mma::pin(scores);
    mma::fence();
    #[unroll]
    for s in 0..comptime![plan.head_dim / STEP] {
        let (a, b) = (q + comptime![mma::advance(q_layout, 0, s * STEP)], k + comptime![mma::advance(k_layout, 0, s * STEP)]);
        mma::mma(scores, a, b, plan.block, q_layout.major, k_layout.major);
    }
    mma::commit();
}

/// Starts `sum += weights v` as one group.
#[cube]
fn issue_values(state: &mut RowState, v: u64, #[comptime] plan: ForwardPlan) {
    let v_layout = comptime![mma::mn_major(plan.head_dim, plan.block)];
    mma::pin(&mut state.sum);
    #[unroll]
    for s in 0..comptime![plan.block / STEP] {
        mma::pin(state.weights.index_mut(s));
    }
    mma::fence();
    #[unroll]
    for s in 0..comptime![plan.block / STEP] {
        let b = v + comptime![mma::advance(v_layout, 0, s * STEP)];
        mma::mma_registers(&mut state.sum, state.weights.index(s), b, plan.head_dim, v_layout.major);
    }
    mma::commit();
}

/// Hides the keys that row `row` and row `row + 8` do not see; `column` is the key of the unit's first score.
#[cube]
fn hide(scores: &mut Array<f32>, row: u32, queries: u32, keys: u32, column: u32, #[comptime] plan: ForwardPlan) {
    #[unroll]
    for half in 0..2usize {
        let mut seen = keys as i32 - column as i32;
        if comptime![plan.causal] {
            seen = min(seen, (row + keys - queries) as i32 + comptime![(half * 8 + 1) as i32] - column as i32);
        }
        #[unroll]
        for i in 0..comptime![plan.block / 4] {
            let index = comptime![(i / 2) * 4 + half * 2 + i % 2];
            let key = comptime![((i / 2) * 8 + i % 2) as i32];
            scores[index] = select(key < seen, scores[index], HIDDEN);
        }
    }
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

/// The exponentials as the left operand of the next product.
#[cube]
fn pack_weights(state: &mut RowState, #[comptime] plan: ForwardPlan) {
    #[unroll]
    for s in 0..comptime![plan.block / STEP] {
        #[unroll]
        for i in 0..4usize {
            let at = comptime![s * 8 + i * 2];
            let packed = mma::pack(state.scores[at], state.scores[at + 1]);
            let weights = state.weights.index_mut(s);
            weights[i] = packed;
        }
    }
}
