//! The gradient of the queries: like the forward kernel, 128 query rows a cube, over the key blocks they see.
use super::draw;
use super::tile::{self, Draws, Ring};
use super::variant::{Part, Sizes, Variant, part};
use crate::hopper::mma::{self, Pair};
use crate::hopper::ptx;
use crate::hopper::ring::barrier_at;
use crate::tiling::{KeyBlocks, QUERY_ROWS};
use cubecl::prelude::*;
use half::bf16;

/// What is fixed when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueryGradientPlan {
    /// What it computes.
    pub variant: Variant,
    /// Keys per step.
    pub block: usize,
    /// Key and value tiles in flight.
    pub stages: usize,
}

impl QueryGradientPlan {
    /// What was fastest on an H200 (8192 queries and keys, 32 and 8 heads) for head dimensions 64 and 128; for the others,
    /// what fits into shared memory and registers.
    pub fn fastest(variant: Variant) -> Self {
        let block = match variant.head_dim {
            64..=128 => 112,
            192 => 80,
            _ => 48,
        };
        Self { variant, block, stages: 2 }
    }
}

const LOG2_E: f32 = core::f32::consts::LOG2_E;

/// `q_gradient = scale · dS k` with `dS = P ∘ (out_gradient vᵀ - delta)` and `P = exp(q kᵀ · scale - lse)`; with dropout
/// the product in the brackets is multiplied with 0 or `keep`. 256 units; cube `(head, sequence, block)`; boxes of 64 rows
/// (`q`, `out_gradient`), `block` rows (`k`, `v`) and those for stores (`q_gradient`). `sums` is what [`super::delta`]
/// leaves.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn query_gradient(
    q: &TensorMap<bf16, Tiled>,
    k: &TensorMap<bf16, Tiled>,
    v: &TensorMap<bf16, Tiled>,
    out_gradient: &TensorMap<bf16, Tiled>,
    sums: &[f32],
    drop_keys: &[u32],
    query_starts: &[i32],
    key_starts: &[i32],
    q_gradient: &mut TensorMap<bf16, Tiled>,
    sizes: Sizes,
    scale: f32,
    #[comptime] plan: QueryGradientPlan,
) {
    let variant = comptime![plan.variant];
    let (d, v_dim) = (variant.head_dim, variant.value_dim);
    let block = comptime![plan.block];
    let q_tile = comptime![mma::ROWS * variant.key_width() / 2];
    let g_tile = comptime![mma::ROWS * variant.value_width() / 2];

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
    let mut g_smem = Shared::<[Pair]>::new_aligned_slice(comptime![2 * g_tile], 1024usize);
    let fixed = Shared::<[u64]>::new_slice(1usize);
    if UNIT_POS == 0 {
        barrier_at(&fixed, 0usize).init_manual(1);
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
        keep: sizes.keep,
        first_column: draw::spread(part.first_key + sizes.first_key),
    };
    let role = plane_broadcast(UNIT_POS / 128, 0u32);
    if UNIT_POS == 0 {
        let full = barrier_at(&fixed, 0usize);
        full.arrive_and_expect_tx(1, comptime![(4 * 2 * (q_tile + g_tile)) as u32]);
        #[unroll]
        for wg in 0..2usize {
            let row = (part.first_query + first_row) as i32 + comptime![(wg * mma::ROWS) as i32];
            let tile = q_smem.slice_mut(comptime![wg * q_tile], comptime![(wg + 1) * q_tile]);
            tile::fetch(&fixed, 0usize, tile, q, source.batch, head as i32, row, mma::ROWS, d);
            let tile = g_smem.slice_mut(comptime![wg * g_tile], comptime![(wg + 1) * g_tile]);
            tile::fetch(&fixed, 0usize, tile, out_gradient, source.batch, head as i32, row, mma::ROWS, v_dim);
        }
        // All but one stage; the steps keep that distance.
        for step in 0..u32::min(count, comptime![plan.stages as u32 - 1]) {
            load(&mut k_ring, k, &source, step, d, plan);
            load(&mut v_ring, v, &source, step, v_dim, plan);
        }
    }

    let lane = UNIT_POS % 32;
    let row = first_row + role * 64 + ((UNIT_POS / 32) % 4) * 16 + lane / 4;
    let own = role as usize * q_tile;
    let own_g = role as usize * g_tile;
    let at = Operands {
        q: mma::descriptor(q_smem.slice(own, own + q_tile), comptime![mma::k_major(mma::ROWS, variant.key_width())]),
        out_gradient: mma::descriptor(
            g_smem.slice(own_g, own_g + g_tile),
            comptime![mma::k_major(mma::ROWS, variant.value_width())],
        ),
        k: mma::descriptor(k_ring.tiles.as_slice(), comptime![mma::k_major(block, variant.key_width())]),
        k_columns: mma::descriptor(k_ring.tiles.as_slice(), comptime![mma::mn_major(variant.key_width(), block)]),
        v: mma::descriptor(v_ring.tiles.as_slice(), comptime![mma::k_major(block, variant.value_width())]),
    };
    let statistics = (part.batch as u32 * CUBE_COUNT_X + head) * sizes.stride + part.first_query;
    let mut state = RowState {
        scores: Array::new(comptime![block / 2]),
        slopes: Array::new(comptime![block / 2]),
        operand: tile::operand(block),
        sum: Array::new(comptime![d / 2]),
        shift: Array::new(2usize),
        delta: Array::new(2usize),
        draws: tile::draws(drop_keys, statistics, row, part.sight.queries, sizes.statistics, variant.dropout),
    };
    mma::fill(&mut state.sum, 0.0, comptime![d / 2]);
    #[unroll]
    for half in 0..2usize {
        let mut at = row + comptime![(half * 8) as u32];
        if comptime![variant.packed] {
            at = u32::min(at, part.sight.queries - 1);
        }
        state.shift[half] = sums[(statistics + at) as usize];
        state.delta[half] = sums[(sizes.statistics + statistics + at) as usize];
    }
    let scale_log2 = scale * LOG2_E;
    let place = Place { row, column: (lane % 4) * 2 };

    barrier_at(&fixed, 0usize).wait_parity(0);
    // Two copies of a step, one without masks, save some of its time; long heads lack the registers.
    if comptime![variant.window || d > 128] {
        let mut step = 0u32;
        loop {
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
            step += 1;
            if step == count {
                break;
            }
        }
    } else {
        for step in 0..blocks.edge {
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
        for step in blocks.edge..count {
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
    mma::wait(0usize);
    mma::pin(&mut state.sum);
    mma::fill(&mut state.shift, scale, 2usize);
    // The query tile is no longer needed and takes the gradient.
    let tile = q_smem.slice_mut(own, own + q_tile);
    tile::store(
        &state.sum,
        &state.shift,
        tile,
        q_gradient,
        &part,
        head as i32,
        part.first_query,
        first_row + role * 64,
        part.sight.queries,
        d,
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
    /// What dropout multiplies the others with.
    keep: f32,
    /// Spread number of the sequence's first key.
    first_column: u32,
}

/// Where a unit's scores lie.
#[derive(CubeType)]
struct Place {
    row: u32,
    column: u32,
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
    /// The gradients of the scores in 16 bits.
    operand: Sequence<Array<u32>>,
    /// The gradient of the queries so far, not yet scaled.
    sum: Array<f32>,
    /// `-lse` in powers of two.
    shift: Array<f32>,
    delta: Array<f32>,
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
    #[comptime] plan: QueryGradientPlan,
) {
    let row = (source.row + (source.end - 1 - step) * comptime![plan.block as u32]) as i32;
    let slot = tile::slot(step, plan.stages);
    tile::load(ring, &slot, map, source.batch, source.head, row, 0u32, plan.block, head_dim);
}

/// One key block. Its last product still runs when this returns, and is waited for in the next step.
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
    #[comptime] plan: QueryGradientPlan,
) {
    let variant = comptime![plan.variant];
    let (block, element) = (plan.block, variant.element);
    let slot = tile::slot(step, plan.stages);
    let k_offset = tile::offset(&slot, block, comptime![variant.key_width()]);
    let v_offset = tile::offset(&slot, block, comptime![variant.value_width()]);

    tile::arrived(k_ring, &slot);
    tile::issue_scores(&mut state.scores, at.q, at.k + k_offset, block, variant.head_dim, element);
    tile::arrived(v_ring, &slot);
    tile::issue_scores(&mut state.slopes, at.out_gradient, at.v + v_offset, block, variant.value_dim, element);
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
            load(k_ring, k, source, next, variant.head_dim, plan);
            load(v_ring, v, source, next, variant.value_dim, plan);
        }
    }
    let column = (source.end - 1 - step) * comptime![plan.block as u32] + place.column;
    if edge {
        tile::hide(&mut state.scores, place.row, column, &part.sight, block, variant);
    }
    #[unroll]
    for i in 0..comptime![block / 2] {
        let shift = state.shift[comptime![(i / 2) % 2]];
        state.scores[i] = ptx::exp2(fma(state.scores[i], scale_log2, shift));
    }
    mma::wait(0usize);
    mma::pin(&mut state.slopes);
    tile::release(v_ring, &slot);
    let number = source.first_column + draw::spread(column);
    #[unroll]
    for i in 0..comptime![block / 2] {
        let mut slope = state.slopes[i];
        if comptime![variant.dropout] {
            slope = select(tile::survives(&state.draws, number, source.limit, i), slope * source.keep, 0.0);
        }
        state.slopes[i] = state.scores[i] * (slope - state.delta[comptime![(i / 2) % 2]]);
    }
    tile::pack_operand(&mut state.operand, &state.slopes, block, false, element);
    tile::issue_product(&mut state.sum, &mut state.operand, at.k_columns + k_offset, block, variant.head_dim, element);
}
