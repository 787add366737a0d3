//! The gradients of the keys and values: 128 keys of one key head a cube, over the queries of the heads that share it.
//!
//! The products are taken transposed, keys as rows: what the softmax leaves in a warpgroup's registers then is the left
//! operand of the next product, and no score passes through shared memory. Long heads take two launches, one for each
//! gradient: the registers do not hold both sums.
use super::draw;
use super::tile::{self, HIDDEN, Ring};
use super::variant::{Part, Sizes, Variant, part};
use crate::hopper::mma::{self, Pair};
use crate::hopper::ptx;
use crate::hopper::ring::barrier_at;
use crate::tiling::{KEY_ROWS, QueryBlocks};
use cubecl::prelude::*;
use half::bf16;

/// Which gradients a launch computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gradient {
    /// Of keys and values.
    Both,
    /// Of keys only.
    Keys,
    /// Of values only.
    Values,
}

/// What is fixed when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeyGradientPlan {
    /// What it computes.
    pub variant: Variant,
    /// Of which inputs.
    pub gradient: Gradient,
    /// Queries per step; divides 128.
    pub block: usize,
    /// Query tiles in flight.
    pub stages: usize,
    /// The gradients of the probabilities are started before the last step's products are done. Needs more registers.
    pub early: bool,
}

impl KeyGradientPlan {
    /// The launches that were fastest on an H200 (8192 queries and keys, 32 and 8 heads) for head dimensions 64 and 128; for the
    /// others, what fits into shared memory and registers.
    pub fn fastest(variant: Variant) -> Vec<Self> {
        let plan = |gradient, block, early| Self { variant, gradient, block, stages: 2, early };
        match variant.head_dim {
            64 => vec![plan(Gradient::Both, 128, false)],
            96 | 128 => vec![plan(Gradient::Both, 64, false)],
            192 => vec![plan(Gradient::Values, 128, false), plan(Gradient::Keys, 64, false)],
            _ => vec![plan(Gradient::Values, 64, false), plan(Gradient::Keys, 32, true)],
        }
    }

    fn keys(&self) -> bool {
        self.gradient != Gradient::Values
    }

    fn values(&self) -> bool {
        self.gradient != Gradient::Keys
    }

    /// Pairs of a warpgroup's values in shared memory.
    fn value_tile(&self) -> usize {
        if self.keys() { mma::ROWS * self.variant.value_width() / 2 } else { 0 }
    }

    /// Queries whose statistics come with a block. The copy engine reads from multiples of 16 bytes on, so that those of packed
    /// sequences begin up to three numbers early.
    pub(super) fn line(&self) -> usize {
        if self.variant.packed { self.block + 4 } else { self.block }
    }

    /// Numbers of one stage's statistics, a multiple of 128 bytes.
    fn statistics(&self) -> usize {
        (2 * self.line()).next_multiple_of(32)
    }

    /// Whether queries may have to be hidden from a key that follow those it sees.
    fn bounded(&self) -> bool {
        self.variant.window || self.variant.packed
    }
}

const LOG2_E: f32 = core::f32::consts::LOG2_E;
/// Below every query's number, and far from the least `i32`.
const BEFORE_ALL: i32 = -(1 << 30);

/// `k_gradient = scale · dSᵀ q` and `v_gradient = Pᵀ out_gradient` with `dS` and `P` as in
/// [`query_gradient`](super::query_gradient). 256 units; cube `(key head, sequence, block)`; boxes of 64 rows (`k`, `v`),
/// `block` rows (`q`, `out_gradient`), those for stores (the gradients), and `block` columns of all kinds of `sums` and
/// `drop_keys`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn key_gradient(
    q: &TensorMap<bf16, Tiled>,
    k: &TensorMap<bf16, Tiled>,
    v: &TensorMap<bf16, Tiled>,
    out_gradient: &TensorMap<bf16, Tiled>,
    sums: &TensorMap<f32, Tiled>,
    drop_keys: &TensorMap<u32, Tiled>,
    query_starts: &[i32],
    key_starts: &[i32],
    k_gradient: &mut TensorMap<bf16, Tiled>,
    v_gradient: &mut TensorMap<bf16, Tiled>,
    sizes: Sizes,
    scale: f32,
    #[comptime] plan: KeyGradientPlan,
) {
    let variant = comptime![plan.variant];
    let (d, v_dim) = (variant.head_dim, variant.value_dim);
    let block = comptime![plan.block];
    let k_tile = comptime![mma::ROWS * variant.key_width() / 2];
    let v_tile = comptime![plan.value_tile()];

    let kv_head = CUBE_POS_X;
    let part = part(query_starts, key_starts, &sizes, variant.packed);
    // Causal keys further up have more queries: they start first.
    let first_key = CUBE_POS_Z * comptime![KEY_ROWS as u32];
    if comptime![variant.packed] {
        // The grid is as large as the longest sequence asks for.
        if first_key >= part.sight.keys {
            terminate!();
        }
    }

    let mut k_smem = Shared::<[Pair]>::new_aligned_slice(comptime![2 * k_tile], 1024usize);
    let fixed = Shared::<[u64]>::new_slice(1usize);
    if UNIT_POS == 0 {
        barrier_at(&fixed, 0usize).init_manual(1);
    }
    // Without the gradient of the keys, no values are needed: one line keeps the declaration.
    let mut v_smem = Shared::<[Pair]>::new_aligned_slice(comptime![usize::max(2 * v_tile, 32)], 1024usize);
    let mut q_ring = tile::ring(plan.stages, block, comptime![variant.key_width()]);
    let mut g_ring = tile::ring(plan.stages, block, comptime![variant.value_width()]);
    let sums_smem = Shared::<[f32]>::new_aligned_slice(comptime![plan.stages * plan.statistics()], 128usize);
    let draw_len = comptime![if variant.dropout { plan.stages * plan.statistics() } else { 32 }];
    let drop_smem = Shared::<[u32]>::new_aligned_slice(draw_len, 128usize);
    sync_async_proxy_shared();
    sync_cube();

    let blocks = QueryBlocks::new(
        first_key,
        &part.sight,
        comptime![block as u32],
        comptime![variant.causal],
        comptime![variant.window],
        comptime![plan.bounded()],
    );
    let steps = blocks.end - blocks.first;
    let source = Source {
        batch: part.batch,
        head: kv_head * sizes.group,
        heads: CUBE_COUNT_X * sizes.group,
        row: part.first_query,
        first: blocks.first,
        steps,
        total: steps * sizes.group,
        limit: sizes.limit,
        keep: sizes.keep,
    };
    let role = plane_broadcast(UNIT_POS / 128, 0u32);
    let mut statistics = Statistics { sums: sums_smem, drop_keys: drop_smem };
    if UNIT_POS == 0 {
        let full = barrier_at(&fixed, 0usize);
        full.arrive_and_expect_tx(1, comptime![(4 * 2 * (k_tile + v_tile)) as u32]);
        #[unroll]
        for wg in 0..2usize {
            let row = (part.first_key + first_key) as i32 + comptime![(wg * mma::ROWS) as i32];
            let tile = k_smem.slice_mut(comptime![wg * k_tile], comptime![(wg + 1) * k_tile]);
            tile::fetch(&fixed, 0usize, tile, k, source.batch, kv_head as i32, row, mma::ROWS, d);
            if comptime![plan.keys()] {
                let tile = v_smem.slice_mut(comptime![wg * v_tile], comptime![(wg + 1) * v_tile]);
                tile::fetch(&fixed, 0usize, tile, v, source.batch, kv_head as i32, row, mma::ROWS, v_dim);
            }
        }
        // All but one stage; the steps keep that distance.
        for step in 0..u32::min(source.total, comptime![plan.stages as u32 - 1]) {
            load(&mut q_ring, &mut g_ring, &mut statistics, q, out_gradient, sums, drop_keys, &source, step, plan);
        }
    }

    let lane = UNIT_POS % 32;
    let row = first_key + role * 64 + ((UNIT_POS / 32) % 4) * 16 + lane / 4;
    let own = role as usize * k_tile;
    let own_v = role as usize * v_tile;
    let key_layout = comptime![mma::k_major(mma::ROWS, variant.key_width())];
    let at = Operands {
        k: mma::descriptor(k_smem.slice(own, own + k_tile), key_layout),
        v: mma::descriptor(
            v_smem.slice(own_v, own_v + v_tile),
            comptime![mma::k_major(mma::ROWS, variant.value_width())],
        ),
        q: mma::descriptor(q_ring.tiles.as_slice(), comptime![mma::k_major(block, variant.key_width())]),
        q_columns: mma::descriptor(q_ring.tiles.as_slice(), comptime![mma::mn_major(variant.key_width(), block)]),
        out_gradient: mma::descriptor(g_ring.tiles.as_slice(), comptime![mma::k_major(block, variant.value_width())]),
        out_gradient_columns: mma::descriptor(
            g_ring.tiles.as_slice(),
            comptime![mma::mn_major(variant.value_width(), block)],
        ),
    };
    let mut state = KeyState {
        scores: Array::new(comptime![block / 2]),
        slopes: Array::new(comptime![block / 2]),
        weights: tile::operand(block),
        operand: tile::operand(block),
        k_sum: Array::new(comptime![d / 2]),
        v_sum: Array::new(comptime![v_dim / 2]),
    };
    if comptime![plan.keys()] {
        mma::fill(&mut state.k_sum, 0.0, comptime![d / 2]);
    }
    if comptime![plan.values()] {
        mma::fill(&mut state.v_sum, 0.0, comptime![v_dim / 2]);
    }
    let scale_log2 = scale * LOG2_E;
    let seen = seen_by(&part, row, (lane % 4) * 2, plan);
    let number = draw::spread(sizes.first_key + part.first_key + row);

    barrier_at(&fixed, 0usize).wait_parity(0);
    // One loop over the blocks of all heads: the assembler lets no products overlap in a loop in a loop.
    let mut in_head = 0u32;
    let mut step = 0u32;
    loop {
        let block_start = (blocks.first + in_head) * comptime![block as u32];
        let mut edge = in_head < blocks.edge;
        if comptime![plan.bounded()] {
            edge = edge || in_head + blocks.high_edge >= steps;
        }
        advance(
            &mut state,
            &mut q_ring,
            &mut g_ring,
            &mut statistics,
            &source,
            &at,
            q,
            out_gradient,
            sums,
            drop_keys,
            step,
            scale_log2,
            edge,
            &seen,
            block_start as i32,
            number,
            plan,
        );
        in_head = select(in_head + 1 == steps, 0, in_head + 1);
        step += 1;
        if step == source.total {
            break;
        }
    }
    mma::wait(0usize);
    if comptime![plan.keys()] {
        mma::pin(&mut state.k_sum);
    }
    if comptime![plan.values()] {
        mma::pin(&mut state.v_sum);
    }
    // The key and value tiles are no longer needed and take the gradients.
    let mut factor = Array::<f32>::new(2usize);
    let at_row = first_key + role * 64;
    let (from, rows) = (part.first_key, part.sight.keys);
    if comptime![plan.values()] {
        if comptime![variant.dropout] {
            mma::fill(&mut factor, sizes.keep, 2usize);
        } else {
            mma::fill(&mut factor, 1.0, 2usize);
        }
        if comptime![plan.keys()] {
            let tile = v_smem.slice_mut(own_v, own_v + v_tile);
            let head = kv_head as i32;
            tile::store(&state.v_sum, &factor, tile, v_gradient, &part, head, from, at_row, rows, v_dim, variant);
        } else {
            let tile = k_smem.slice_mut(own, own + k_tile);
            let head = kv_head as i32;
            tile::store(&state.v_sum, &factor, tile, v_gradient, &part, head, from, at_row, rows, v_dim, variant);
        }
    }
    if comptime![plan.keys()] {
        mma::fill(&mut factor, scale, 2usize);
        let tile = k_smem.slice_mut(own, own + k_tile);
        let head = kv_head as i32;
        tile::store(&state.k_sum, &factor, tile, k_gradient, &part, head, from, at_row, rows, d, variant);
    }
}

/// Which queries a cube reads.
#[derive(CubeType)]
struct Source {
    batch: i32,
    /// First query head of the group.
    head: u32,
    /// All query heads.
    heads: u32,
    /// First row of the sequence.
    row: u32,
    /// First block of each head.
    first: u32,
    /// Blocks of each head.
    steps: u32,
    /// Blocks of all heads of the group.
    total: u32,
    /// Dropout's draws below this are dropped.
    limit: u32,
    /// What dropout multiplies the others with.
    keep: f32,
}

/// What comes with the queries in the ring: for each stage `-lse` of every query, then `delta`; and the two dropout keys.
#[derive(CubeType)]
struct Statistics {
    sums: Shared<[f32]>,
    drop_keys: Shared<[u32]>,
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
    /// Scores, then probabilities, negative where dropped.
    scores: Array<f32>,
    /// Gradients of the probabilities, then of the scores.
    slopes: Array<f32>,
    /// The probabilities in 16 bits.
    weights: Sequence<Array<u32>>,
    /// The gradients of the scores in 16 bits.
    operand: Sequence<Array<u32>>,
    /// The gradient of the keys so far, not yet scaled.
    k_sum: Array<f32>,
    /// The gradient of the values so far.
    v_sum: Array<f32>,
}

/// The queries that see the key of a unit's first row, counted from the unit's first column; those of its second row are
/// eight further.
#[derive(CubeType)]
struct Seen {
    from: i32,
    to: i32,
    /// None that exist are further.
    end: i32,
}

#[cube]
fn seen_by(part: &Part, row: u32, column: u32, #[comptime] plan: KeyGradientPlan) -> Seen {
    let place = row as i32 - part.sight.offset - column as i32;
    let mut from = BEFORE_ALL.runtime();
    if comptime![plan.variant.causal] {
        from = place;
    } else if comptime![plan.variant.window] {
        from = place + 1 - part.sight.window;
    }
    Seen { from, to: place + part.sight.window, end: part.sight.queries as i32 - column as i32 }
}

/// Hides the queries that do not see a unit's two keys; `block_start` is the block's first query.
#[cube]
fn hide(scores: &mut Array<f32>, seen: &Seen, block_start: i32, #[comptime] plan: KeyGradientPlan) {
    #[unroll]
    for half in 0..2usize {
        let further = comptime![(half * 8) as i32] - block_start;
        let from = seen.from + further;
        let mut to = seen.end - block_start;
        if comptime![plan.variant.window] {
            to = min(to, seen.to + further);
        }
        #[unroll]
        for i in 0..comptime![plan.block / 4] {
            let index = comptime![(i / 2) * 4 + half * 2 + i % 2];
            let query = comptime![((i / 2) * 8 + i % 2) as i32];
            scores[index] = select(query >= from, scores[index], HIDDEN);
            if comptime![plan.bounded()] {
                scores[index] = select(query < to, scores[index], HIDDEN);
            }
        }
    }
}

/// How many numbers the statistics of a block begin early.
#[cube]
fn early(source: &Source, #[comptime] plan: KeyGradientPlan) -> u32 {
    if comptime![plan.variant.packed] { source.row % 4 } else { 0u32.runtime() }
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
    sums: &TensorMap<f32, Tiled>,
    drop_keys: &TensorMap<u32, Tiled>,
    source: &Source,
    step: u32,
    #[comptime] plan: KeyGradientPlan,
) {
    let variant = comptime![plan.variant];
    let block = comptime![plan.block];
    let slot = tile::slot(step, plan.stages);
    let head = source.head + step / source.steps;
    let row = (source.row + (source.first + step % source.steps) * comptime![block as u32]) as i32;
    let row_of_heads = source.batch * source.heads as i32 + head as i32;
    let more = comptime![(8 * plan.line()) as u32 * (1 + variant.dropout as u32)];
    let from = slot.stage * comptime![plan.statistics()];
    let to = from + comptime![2 * plan.line()];
    let from_row = row - early(source, plan) as i32;
    tile::load(q_ring, &slot, q, source.batch, head as i32, row, more, block, variant.head_dim);
    let full = barrier_at(&q_ring.full, slot.stage);
    full.tma_load_3d(sums, statistics.sums.slice_mut(from, to), 0, row_of_heads, from_row);
    if comptime![variant.dropout] {
        full.tma_load_3d(drop_keys, statistics.drop_keys.slice_mut(from, to), 0, row_of_heads, from_row);
    }
    tile::load(g_ring, &slot, out_gradient, source.batch, head as i32, row, 0u32, block, variant.value_dim);
}

/// One query block. Its last products still run when this returns, and are waited for in the next step.
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
    sums: &TensorMap<f32, Tiled>,
    drop_keys: &TensorMap<u32, Tiled>,
    step: u32,
    scale_log2: f32,
    edge: bool,
    seen: &Seen,
    block_start: i32,
    number: u32,
    #[comptime] plan: KeyGradientPlan,
) {
    let variant = comptime![plan.variant];
    let (block, element) = (plan.block, variant.element);
    let slot = tile::slot(step, plan.stages);
    let q_offset = tile::offset(&slot, block, comptime![variant.key_width()]);
    let g_offset = tile::offset(&slot, block, comptime![variant.value_width()]);
    let line = comptime![plan.line()];
    let column = slot.stage * comptime![plan.statistics()] + (early(source, plan) + (UNIT_POS % 4) * 2) as usize;

    tile::arrived(q_ring, &slot);
    tile::issue_scores(&mut state.scores, at.k, at.q + q_offset, block, variant.head_dim, element);
    tile::arrived(g_ring, &slot);
    if comptime![plan.early && plan.keys()] {
        tile::issue_scores(&mut state.slopes, at.v, at.out_gradient + g_offset, block, variant.value_dim, element);
        mma::wait(1usize);
    } else {
        mma::wait(0usize);
    }
    mma::pin(&mut state.scores);
    if comptime![plan.values()] {
        tile::pin_operand(&mut state.weights, block);
    }
    if comptime![plan.keys()] {
        tile::pin_operand(&mut state.operand, block);
    }
    if comptime![!plan.early && plan.keys()] {
        tile::issue_scores(&mut state.slopes, at.v, at.out_gradient + g_offset, block, variant.value_dim, element);
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
            load(q_ring, g_ring, statistics, q, out_gradient, sums, drop_keys, source, next, plan);
        }
    }
    if edge {
        hide(&mut state.scores, seen, block_start, plan);
    }
    #[unroll]
    for i in 0..comptime![block / 8] {
        #[unroll]
        for j in 0..2usize {
            let shift = statistics.sums[column + comptime![8 * i + j]];
            #[unroll]
            for half in 0..2usize {
                let index = comptime![4 * i + 2 * half + j];
                state.scores[index] = ptx::exp2(fma(state.scores[index], scale_log2, shift));
            }
            if comptime![variant.dropout] {
                let first = statistics.drop_keys[column + comptime![8 * i + j]];
                let second = statistics.drop_keys[column + comptime![line + 8 * i + j]];
                #[unroll]
                for half in 0..2usize {
                    let index = comptime![4 * i + 2 * half + j];
                    let place = number + comptime![draw::spread_by(8 * half)];
                    let weight = state.scores[index];
                    state.scores[index] = select(draw::draw(place, first, second) >= source.limit, weight, -weight);
                }
            }
        }
    }
    if comptime![plan.values()] {
        let g_tile = at.out_gradient_columns + g_offset;
        tile::pack_operand(&mut state.weights, &state.scores, block, variant.dropout, element);
        tile::issue_product(&mut state.v_sum, &mut state.weights, g_tile, block, variant.value_dim, element);
    }
    if comptime![plan.keys()] {
        if comptime![plan.values()] {
            mma::wait(1usize);
        } else {
            mma::wait(0usize);
        }
        mma::pin(&mut state.slopes);
        #[unroll]
        for i in 0..comptime![block / 8] {
            #[unroll]
            for j in 0..2usize {
                let delta = statistics.sums[column + comptime![line + 8 * i + j]];
                #[unroll]
                for half in 0..2usize {
                    let index = comptime![4 * i + 2 * half + j];
                    let mut weight = state.scores[index];
                    let mut slope = state.slopes[index];
                    if comptime![variant.dropout] {
                        slope = select(weight > 0.0, slope * source.keep, 0.0);
                        weight = weight.abs();
                    }
                    state.slopes[index] = weight * (slope - delta);
                }
            }
        }
        tile::pack_operand(&mut state.operand, &state.slopes, block, false, element);
        tile::issue_product(
            &mut state.k_sum,
            &mut state.operand,
            at.q_columns + q_offset,
            block,
            variant.head_dim,
            element,
        );
    }
}
