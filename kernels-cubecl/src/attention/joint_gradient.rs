//! All three gradients in one pass over the scores: five products where the two other kernels take seven.
//!
//! Like the key gradient kernel, 128 keys of one key head a cube. The gradients of a query come from many cubes, which
//! add them up in memory in no particular order: two calls differ in the last bits.
use super::joint_sum::{HALF, add_up, meet};
use super::tile::{self, HIDDEN, Ring};
use super::variant::{Part, Sizes, Variant};
use crate::hopper::bulk::{self, Quad};
use crate::hopper::mma::{self, Half, Pair};
use crate::hopper::ptx;
use crate::hopper::ring::barrier_at;
use crate::tiling::{KEY_ROWS, QueryBlocks, Sight};
use cubecl::prelude::*;
use half::bf16;

/// What is fixed when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct JointGradientPlan {
    /// What it computes.
    pub variant: Variant,
    /// Query tiles in flight.
    pub stages: usize,
}

impl JointGradientPlan {
    /// What was fastest on an H200 (8192 queries and keys, 32 and 8 heads), where there is such a kernel: for heads of 128,
    /// of whose columns each warpgroup takes half, without window, packed sequences and dropout.
    pub fn fastest(variant: Variant) -> Option<Self> {
        let Variant { head_dim, value_dim, window, packed, dropout, .. } = variant;
        let fits = head_dim == D && value_dim == D && !window && !packed && !dropout;
        fits.then_some(Self { variant, stages: 2 })
    }
}

/// Queries per step.
pub const BLOCK: usize = 64;
/// Length of a query, key and value.
pub const D: usize = 128;
/// Pairs of a tile of a warpgroup's keys.
const KEY_TILE: usize = mma::ROWS * D / 2;
/// Pairs of a warpgroup's part of the gradients of the scores.
const SLOPE_TILE: usize = mma::ROWS * BLOCK / 2;
/// Places for the gradients of the scores. A warpgroup writes one three steps after the other may have started to read it,
/// and has seen since that the other came to the next step.
const PLACES: usize = 4;
const LOG2_E: f32 = core::f32::consts::LOG2_E;

/// The gradients of keys and values as [`key_gradient`](super::key_gradient) writes them, and those of the queries, not yet
/// scaled, added to `q_sum` in the order that [`gather`](super::joint_sum::gather()) reads. 256 units; cube `(key head, batch, block)`; boxes of 64
/// rows, those for stores (the gradients), and 64 columns of both kinds of `sums`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn joint_gradient(
    q: &TensorMap<bf16, Tiled>,
    k: &TensorMap<bf16, Tiled>,
    v: &TensorMap<bf16, Tiled>,
    out_gradient: &TensorMap<bf16, Tiled>,
    sums: &TensorMap<f32, Tiled>,
    q_sum: &mut [Quad],
    k_gradient: &mut TensorMap<bf16, Tiled>,
    v_gradient: &mut TensorMap<bf16, Tiled>,
    sizes: Sizes,
    scale: f32,
    #[comptime] plan: JointGradientPlan,
) {
    let variant = comptime![plan.variant];
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
    let sums_smem = Shared::<[f32]>::new_aligned_slice(comptime![plan.stages * 2 * BLOCK], 128usize);
    sync_async_proxy_shared();
    sync_cube();

    let kv_head = CUBE_POS_X;
    let sight = Sight { queries: sizes.queries, keys: sizes.keys, offset: sizes.offset, window: sizes.window };
    let part = Part { batch: CUBE_POS_Y as i32, first_query: 0u32, first_key: 0u32, sight };
    // Causal keys further up have more queries: they start first, of all heads. Head by head the cache would hold the sums,
    // but the last head's longest cubes would run alone at the end.
    let first_key = CUBE_POS_Z * comptime![KEY_ROWS as u32];
    let blocks =
        QueryBlocks::new(first_key, &part.sight, comptime![BLOCK as u32], comptime![variant.causal], false, false);
    let steps = blocks.end - blocks.first;
    let source = Source {
        batch: part.batch,
        head: kv_head * sizes.group,
        heads: CUBE_COUNT_X * sizes.group,
        first: blocks.first,
        steps,
        total: steps * sizes.group,
    };
    let role = plane_broadcast(UNIT_POS / 128, 0u32);
    let mut shared = Shares { sums: sums_smem, slopes: slopes_smem, there, stage };
    if UNIT_POS == 0 {
        let full = barrier_at(&fixed, 0usize);
        full.arrive_and_expect_tx(1, comptime![(4 * 4 * KEY_TILE) as u32]);
        #[unroll]
        for wg in 0..2usize {
            let row = first_key as i32 + comptime![(wg * mma::ROWS) as i32];
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
    // The first query that sees the key of this unit's first row, counted from its first column.
    let seen_from = row as i32 - part.sight.offset - ((lane % 4) * 2) as i32;
    // Where this unit's part of the first step's queries lies. The blocks of a head are adjacent; from its last one to the
    // first of the next head it is a jump over the blocks that see none of the keys.
    let blocks_of_head = sizes.stride / comptime![BLOCK as u32];
    let jump = (blocks_of_head + 1 - steps) * comptime![2 * HALF];
    let first_block = (CUBE_POS_Y * CUBE_COUNT_X + kv_head) * sizes.group * blocks_of_head + blocks.first;
    // Two steps before the first.
    let mut target = first_block * comptime![2 * HALF] + role * HALF + UNIT_POS % 128 - jump - comptime![2 * HALF];

    barrier_at(&fixed, 0usize).wait_parity(0);
    // One loop over the blocks of all heads: the assembler lets no products overlap in a loop in a loop.
    let mut in_head = 0u32;
    let mut before = 1u32;
    let mut step = 0u32;
    loop {
        let block_start = (blocks.first + in_head) * comptime![BLOCK as u32];
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
            in_head < blocks.edge,
            seen_from - block_start as i32,
            plan,
        );
        target += select(before == 0, jump, comptime![2 * HALF]);
        before = in_head;
        in_head = select(in_head + 1 == steps, 0, in_head + 1);
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
    let (head, rows) = (kv_head as i32, sizes.keys);
    tile::store(&state.v_sum, &factor, tile, v_gradient, &part, head, 0u32, at_row, rows, D, variant);
    mma::fill(&mut factor, scale, 2usize);
    let tile = k_smem.slice_mut(own, own + KEY_TILE);
    tile::store(&state.k_sum, &factor, tile, k_gradient, &part, head, 0u32, at_row, rows, D, variant);
}

/// Which queries a cube reads.
#[derive(CubeType)]
struct Source {
    batch: i32,
    /// First query head of the group.
    head: u32,
    /// All query heads.
    heads: u32,
    /// First block of each head.
    first: u32,
    /// Blocks of each head.
    steps: u32,
    /// Blocks of all heads of the group.
    total: u32,
}

/// What the units of a cube share besides tiles.
#[derive(CubeType)]
struct Shares {
    /// Of the queries in the ring: for each stage `-lse` of every query, then `delta`.
    sums: Shared<[f32]>,
    /// The gradients of the scores of the last steps.
    slopes: Shared<[Pair]>,
    /// A step's gradients of the queries on their way to memory, half of the columns each warpgroup.
    stage: Shared<[Quad]>,
    /// Barriers: both warpgroups have written their part.
    there: Shared<[u64]>,
}

/// Descriptors of the warpgroup's keys and values and of the first query and output gradient tile; some also as columns to
/// sum over.
#[derive(CubeType)]
struct Operands {
    k: u64,
    /// Of all keys, the warpgroup's half of the columns.
    k_columns: u64,
    v: u64,
    q: u64,
    q_columns: u64,
    out_gradient: u64,
    out_gradient_columns: u64,
    /// Of the warpgroup's keys.
    slopes: u64,
    /// Of all keys.
    slope_columns: u64,
}

/// What a unit holds of its warpgroup's 64 keys: two rows, of each every fourth pair of columns.
#[derive(CubeType)]
struct JointState {
    /// Scores, then probabilities.
    scores: Array<f32>,
    /// Gradients of the probabilities, then of the scores, then of half a query.
    slopes: Array<f32>,
    /// The probabilities in 16 bits.
    weights: Sequence<Array<u32>>,
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
    shared: &mut Shares,
    q: &TensorMap<bf16, Tiled>,
    out_gradient: &TensorMap<bf16, Tiled>,
    sums: &TensorMap<f32, Tiled>,
    source: &Source,
    step: u32,
    #[comptime] plan: JointGradientPlan,
) {
    let slot = tile::slot(step, plan.stages);
    let head = source.head + step / source.steps;
    let row = ((source.first + step % source.steps) * comptime![BLOCK as u32]) as i32;
    let row_of_heads = source.batch * source.heads as i32 + head as i32;
    let from = slot.stage * comptime![2 * BLOCK];
    tile::load(q_ring, &slot, q, source.batch, head as i32, row, comptime![(8 * BLOCK) as u32], BLOCK, D);
    let target = shared.sums.slice_mut(from, from + comptime![2 * BLOCK]);
    barrier_at(&q_ring.full, slot.stage).tma_load_3d(sums, target, 0, row_of_heads, row);
    tile::load(g_ring, &slot, out_gradient, source.batch, head as i32, row, 0u32, BLOCK, D);
}

/// One query block. Its last products still run when this returns, and are waited for in the next step, which also adds
/// the queries' gradients to `target`.
#[cube]
#[allow(clippy::too_many_arguments)]
fn advance(
    state: &mut JointState,
    q_ring: &mut Ring,
    g_ring: &mut Ring,
    shared: &mut Shares,
    source: &Source,
    at: &Operands,
    q: &TensorMap<bf16, Tiled>,
    out_gradient: &TensorMap<bf16, Tiled>,
    sums: &TensorMap<f32, Tiled>,
    q_sum: &mut [Quad],
    target: u32,
    step: u32,
    scale_log2: f32,
    edge: bool,
    seen_from: i32,
    #[comptime] plan: JointGradientPlan,
) {
    let element = comptime![plan.variant.element];
    let slot = tile::slot(step, plan.stages);
    let offset = tile::offset(&slot, BLOCK, D);
    let column = slot.stage * comptime![2 * BLOCK] + ((UNIT_POS % 4) * 2) as usize;

    tile::arrived(q_ring, &slot);
    tile::issue_scores(&mut state.scores, bulk::descriptor_here(at.k), at.q + offset, BLOCK, D, element);
    mma::wait(0usize);
    mma::pin(&mut state.scores);
    mma::pin(&mut state.slopes);
    if step > 0 {
        // The products of the step before are done, and with them that step's tiles.
        let before = tile::slot(step - 1, plan.stages);
        tile::release(q_ring, &before);
        tile::release(g_ring, &before);
    }
    if step > 1 {
        add_up(q_sum, target, &mut shared.stage, &state.slopes);
    }
    if UNIT_POS == 0 {
        let next = step + comptime![plan.stages as u32 - 1];
        if next < source.total {
            load(q_ring, g_ring, shared, q, out_gradient, sums, source, next, plan);
        }
    }
    tile::arrived(g_ring, &slot);
    tile::issue_scores(&mut state.slopes, bulk::descriptor_here(at.v), at.out_gradient + offset, BLOCK, D, element);
    if edge {
        #[unroll]
        for i in 0..comptime![BLOCK / 2] {
            // Column of this score, less the eight rows that the second row is further down.
            let query = comptime![(8 * (i / 4) + i % 2) as i32 - 8 * ((i / 2) % 2) as i32];
            state.scores[i] = select(query >= seen_from, state.scores[i], HIDDEN);
        }
    }
    #[unroll]
    for i in 0..comptime![BLOCK / 8] {
        #[unroll]
        for j in 0..2usize {
            let shift = shared.sums[column + comptime![8 * i + j]];
            #[unroll]
            for half in 0..2usize {
                let index = comptime![4 * i + 2 * half + j];
                state.scores[index] = ptx::exp2(fma(state.scores[index], scale_log2, shift));
            }
        }
    }
    tile::pack_operand(&mut state.weights, &state.scores, BLOCK, false, element);
    tile::issue_product(&mut state.v_sum, &mut state.weights, at.out_gradient_columns + offset, BLOCK, D, element);
    mma::wait(1usize);
    mma::pin(&mut state.slopes);
    #[unroll]
    for i in 0..comptime![BLOCK / 8] {
        #[unroll]
        for j in 0..2usize {
            let delta = shared.sums[column + comptime![BLOCK + 8 * i + j]];
            #[unroll]
            for half in 0..2usize {
                let index = comptime![4 * i + 2 * half + j];
                state.slopes[index] = state.scores[index] * (state.slopes[index] - delta);
            }
        }
    }
    let place = (step % comptime![PLACES as u32]) as usize;
    let own = (2 * place + (UNIT_POS / 128) as usize) * SLOPE_TILE;
    share(&state.slopes, shared.slopes.slice_mut(own, own + SLOPE_TILE), element);
    sync_async_proxy_shared();
    sync_plane();
    if UNIT_POS % 32 == 0 {
        barrier_at(&shared.there, place).arrive();
    }
    // What the last step has staged is read long since.
    if UNIT_POS % 128 == 0 {
        bulk::wait_for_reads();
    }
    meet();
    issue_key_gradient(&mut state.k_sum, at.slopes + place_of(step), at.q_columns + offset, element);
    // The values' product is done: its operand's registers are free.
    mma::wait(1usize);
    mma::pin(&mut state.v_sum);
    tile::pin_operand(&mut state.weights, BLOCK);
    // The queries of the step before: the other warpgroup has most likely come that far. In the first step this reads what
    // happens to be there, and nobody takes the result.
    if step > 0 {
        wait_for_slopes(shared, step - 1);
    }
    let columns = at.slope_columns + place_of(step + comptime![PLACES as u32 - 1]);
    issue_query_gradient(&mut state.slopes, columns, bulk::descriptor_here(at.k_columns), element);
}

/// Waits until both warpgroups have written the gradients of the scores of step `step`.
#[cube]
fn wait_for_slopes(shared: &mut Shares, step: u32) {
    let places = comptime![PLACES as u32];
    barrier_at(&shared.there, (step % places) as usize).wait_parity((step / places) % 2);
}

/// What to add to the descriptors of the first place for that of step `step`.
#[cube]
fn place_of(step: u32) -> u64 {
    (step % comptime![PLACES as u32]) as u64 * comptime![(2 * SLOPE_TILE * 4 / 16) as u64]
}

/// Writes the warpgroup's 64 keys of `slopes` in 16 bits to `tile`, a line a key.
#[cube]
fn share(slopes: &Array<f32>, tile: &mut [Pair], #[comptime] element: Half) {
    let layout = comptime![mma::k_major(mma::ROWS, BLOCK)];
    let unit = bulk::here(UNIT_POS % 128);
    let lane = unit % 32;
    let first = (unit / 32) * 16 + lane / 4;
    #[unroll]
    for i in 0..comptime![BLOCK / 4] {
        let pair = mma::pack(slopes[2 * i], slopes[2 * i + 1], element);
        let line = first as usize + comptime![8 * (i % 2)];
        let along = comptime![(i / 2) * 8] + ((lane % 4) * 2) as usize;
        tile[layout.offset(line, along, 2usize) / 2] = Pair::reinterpret(pair);
    }
}

/// Starts `sum += slopes · q`: the warpgroup's 64 keys over the step's queries.
#[cube]
fn issue_key_gradient(sum: &mut Array<f32>, slopes: u64, q_columns: u64, #[comptime] element: Half) {
    let a_layout = comptime![mma::k_major(mma::ROWS, BLOCK)];
    let b_layout = comptime![mma::mn_major(D, BLOCK)];
    mma::pin(sum);
    mma::fence();
    #[unroll]
    for s in 0..comptime![BLOCK / mma::STEP] {
        let a = slopes + comptime![mma::advance(a_layout, 0, s * mma::STEP)];
        let b = q_columns + comptime![mma::advance(b_layout, 0, s * mma::STEP)];
        mma::mma(sum, a, b, D, a_layout.major, b_layout.major, element);
    }
    mma::commit();
}

/// Starts `sum = slopesᵀ · k`: the step's queries over all 128 keys, the warpgroup's half of the columns.
#[cube]
fn issue_query_gradient(sum: &mut Array<f32>, slope_columns: u64, k_columns: u64, #[comptime] element: Half) {
    let a_layout = comptime![mma::mn_major(BLOCK, KEY_ROWS)];
    let b_layout = comptime![mma::mn_major(D, mma::ROWS)];
    mma::fill(sum, 0.0, comptime![D / 4]);
    mma::pin(sum);
    mma::fence();
    #[unroll]
    for s in 0..comptime![KEY_ROWS / mma::STEP] {
        let a = slope_columns + comptime![mma::advance(a_layout, 0, s * mma::STEP)];
        // The keys of each warpgroup are a tile of their own.
        let (tile, key) = comptime![(s * mma::STEP / mma::ROWS, s * mma::STEP % mma::ROWS)];
        let b = k_columns + comptime![(tile * KEY_TILE * 4 / 16) as u64 + mma::advance(b_layout, 0, key)];
        mma::mma(sum, a, b, comptime![D / 2], a_layout.major, b_layout.major, element);
    }
    mma::commit();
}
