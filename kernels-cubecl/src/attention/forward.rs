//! The forward kernel: two warpgroups of 64 query rows each; one of their units also drives the copy engine.
//!
//! A third warpgroup for the copies would leave each unit 168 registers: CubeCL has the driver link its kernels, and in
//! that mode `setmaxnreg` is ignored.
use super::draw;
use super::tile::{self, Draws, HIDDEN, Ring};
use super::variant::{Part, Sizes, Variant, part};
use crate::hopper::mma::{self, Pair};
use crate::hopper::ptx;
use crate::hopper::ring::barrier_at;
use crate::tiling::{KeyBlocks, QUERY_ROWS};
use cubecl::prelude::*;
use half::bf16;

/// What is fixed when the forward kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ForwardPlan {
    /// What it computes.
    pub variant: Variant,
    /// Keys per step.
    pub block: usize,
    /// Key and value tiles in flight.
    pub stages: usize,
    /// The product with the values runs under the exponentials of the next scores.
    pub overlap: bool,
    /// The two warpgroups take turns at the tensor cores, so that one computes exponentials while the other multiplies.
    pub turns: bool,
}

impl ForwardPlan {
    /// What was fastest on an H200 (8192 queries and keys, 32 and 8 heads) for head dimensions 64 and 128; for the others,
    /// what fits into shared memory and registers.
    pub fn fastest(variant: Variant) -> Self {
        let (block, pipelined) = match variant.head_dim {
            // Small enough for two cubes on a multiprocessor.
            64 => (80, false),
            // The draws need registers too.
            96 | 128 if variant.dropout => (112, true),
            96 => (160, true),
            128 if variant.causal || variant.window => (160, true),
            128 => (176, true),
            192 => (128, true),
            _ => (80, true),
        };
        Self { variant, block, stages: 2, overlap: pipelined, turns: pipelined }
    }
}

/// Hardware barriers of the turns of the two warpgroups.
const FIRST_TURN: u32 = 2;
const SECOND_TURN: u32 = 3;
const LN_2: f32 = core::f32::consts::LN_2;

/// `out = softmax(q kᵀ · scale) v` for 128 query rows of one head; `lse` gets the natural logarithm of the sum of
/// exponentials. 256 units; cube `(head, sequence, block)`; tensor maps as `maps` makes them, with boxes of 64 rows (`q`),
/// `block` rows (`k`, `v`), and those for stores (`out`). A row that sees no key gets zeros and minus infinity.
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
    let rows = comptime![QUERY_ROWS as u32];
    if comptime![variant.packed] {
        // The grid is as large as the longest sequence asks for.
        if CUBE_POS_Z * rows >= part.sight.queries {
            terminate!();
        }
    }

    let mut q_smem = Shared::<[Pair]>::new_aligned_slice(comptime![2 * q_tile], 1024usize);
    let q_full = Shared::<[u64]>::new_slice(1usize);
    if UNIT_POS == 0 {
        barrier_at(&q_full, 0usize).init_manual(1);
    }
    let mut k_ring = tile::ring(plan.stages, block, comptime![variant.key_width()]);
    let mut v_ring = tile::ring(plan.stages, block, comptime![variant.value_width()]);
    sync_async_proxy_shared();
    sync_cube();

    // Causal rows further down have more work: they start first.
    let row_block = if comptime![variant.causal] { (part.sight.queries - 1) / rows - CUBE_POS_Z } else { CUBE_POS_Z };
    let first_row = row_block * rows;
    let blocks = KeyBlocks::new(
        first_row,
        &part.sight,
        comptime![block as u32],
        comptime![variant.causal],
        comptime![variant.window],
    );
    let count = blocks.end - blocks.first;
    let source = Source {
        batch: part.batch,
        head: (head / sizes.group) as i32,
        row: part.first_key,
        end: blocks.end,
        count,
        limit: sizes.limit,
        first_column: draw::spread(part.first_key + sizes.first_key),
    };
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
        load(&mut k_ring, k, &source, 0u32, d, plan);
        load(&mut v_ring, v, &source, 0u32, variant.value_dim, plan);
        if count > 1 {
            load(&mut k_ring, k, &source, 1u32, d, plan);
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

    if comptime![plan.turns] {
        if role == 1 {
            ptx::named_barrier_arrive(FIRST_TURN, 256u32);
        }
    }
    if comptime![variant.window] {
        for step in 1..count {
            let edge = step < blocks.edge || step + blocks.low_edge >= count;
            advance(
                &mut state,
                &mut k_ring,
                &mut v_ring,
                &place,
                &part,
                &source,
                &at,
                k,
                v,
                step,
                scale_log2,
                edge,
                plan,
            );
        }
    } else {
        for step in 1..blocks.edge {
            advance(
                &mut state,
                &mut k_ring,
                &mut v_ring,
                &place,
                &part,
                &source,
                &at,
                k,
                v,
                step,
                scale_log2,
                true,
                plan,
            );
        }
        for step in u32::max(1, blocks.edge)..count {
            advance(
                &mut state,
                &mut k_ring,
                &mut v_ring,
                &place,
                &part,
                &source,
                &at,
                k,
                v,
                step,
                scale_log2,
                false,
                plan,
            );
        }
    }
    let slot = tile::slot(count - 1, plan.stages);
    tile::arrived(&mut v_ring, &slot);
    let v_tile = at.v + tile::offset(&slot, block, comptime![variant.value_width()]);
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
        let end = if comptime![variant.packed] { part.sight.queries } else { sizes.stride };
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
        &part,
        head as i32,
        part.first_query,
        first_row + role * 64,
        part.sight.queries,
        variant.value_dim,
        variant,
    );
}

/// Which keys and values a cube reads.
#[derive(CubeType)]
struct Source {
    batch: i32,
    head: i32,
    /// First row of the sequence.
    row: u32,
    /// One past the last block, which is read first.
    end: u32,
    /// Blocks.
    count: u32,
    /// Dropout's draws below this are dropped.
    limit: u32,
    /// Spread number of the sequence's first key.
    first_column: u32,
}

/// Where a unit's scores lie.
#[derive(CubeType)]
struct Place {
    /// The warpgroup, 0 or 1.
    role: u32,
    row: u32,
    column: u32,
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
    /// Keys of dropout.
    draws: Draws,
}

/// Starts the copy of the tile of step `step`.
#[cube]
fn load(
    ring: &mut Ring,
    map: &TensorMap<bf16, Tiled>,
    source: &Source,
    step: u32,
    #[comptime] head_dim: usize,
    #[comptime] plan: ForwardPlan,
) {
    let row = (source.row + (source.end - 1 - step) * comptime![plan.block as u32]) as i32;
    let slot = tile::slot(step, plan.stages);
    tile::load(ring, &slot, map, source.batch, source.head, row, 0u32, plan.block, head_dim);
}

/// Step `step`: the scores of its key block, under whose softmax runs the product of the block before with its values.
#[cube]
#[allow(clippy::too_many_arguments)]
fn advance(
    state: &mut RowState,
    k_ring: &mut Ring,
    v_ring: &mut Ring,
    place: &Place,
    part: &Part,
    source: &Source,
    at: &Operands,
    k: &TensorMap<bf16, Tiled>,
    v: &TensorMap<bf16, Tiled>,
    step: u32,
    scale_log2: f32,
    edge: bool,
    #[comptime] plan: ForwardPlan,
) {
    let variant = comptime![plan.variant];
    let (block, d) = (plan.block, variant.head_dim);
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
    let k_tile = at.k + tile::offset(&k_slot, block, comptime![variant.key_width()]);
    tile::issue_scores(&mut state.scores, at.q, k_tile, block, d, variant.element);
    tile::arrived(v_ring, &v_slot);
    let v_tile = at.v + tile::offset(&v_slot, block, comptime![variant.value_width()]);
    tile::issue_product(&mut state.sum, &mut state.weights, v_tile, block, variant.value_dim, variant.element);
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
            load(k_ring, k, source, step + 1, d, plan);
        }
        load(v_ring, v, source, step, variant.value_dim, plan);
    }
    mma::wait(1usize);
    mma::pin(&mut state.scores);
    tile::release(k_ring, &k_slot);
    let column = (source.end - 1 - step) * comptime![plan.block as u32] + place.column;
    if edge {
        tile::hide(&mut state.scores, place.row, column, &part.sight, block, variant);
    }
    softmax(state, source, column, scale_log2, plan);
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
    for i in 0..comptime![variant.value_dim / 2] {
        state.sum[i] = state.sum[i] * state.factor[comptime![(i / 2) % 2]];
    }
    tile::pack_operand(&mut state.weights, &state.scores, block, false, variant.element);
}

/// One step of the online softmax: `scores` become exponentials over the greatest score so far, zero where they are
/// dropped. The total counts them all. `column` is the key of the unit's first score.
#[cube]
fn softmax(state: &mut RowState, source: &Source, column: u32, scale_log2: f32, #[comptime] plan: ForwardPlan) {
    let place = source.first_column + draw::spread(column);
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
            total += weight;
            if comptime![plan.variant.dropout] {
                state.scores[index] = select(tile::survives(&state.draws, place, source.limit, index), weight, 0.0);
            } else {
                state.scores[index] = weight;
            }
        }
        state.total[half] = total;
        state.factor[half] = factor;
    }
}
