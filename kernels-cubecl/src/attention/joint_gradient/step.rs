//! A step: the queries of a block with the cube's keys.
use super::mask::{Seen, hide};
use super::plan::{BLOCK, D, JointGradientPlan, PLACES, SLOPE_TILE};
use super::slopes::{issue_key_gradient, issue_query_gradient, place_of, share, wait_for_slopes};
use crate::attention::joint_sum::{add_up, meet};
use crate::attention::query_walk::{self, Source};
use crate::attention::tile::{self, Ring};
use crate::hopper::bulk::{self, Quad};
use crate::hopper::mma::{self, Pair};
use crate::hopper::ptx;
use crate::hopper::ring::barrier_at;
use cubecl::prelude::*;
use half::bf16;

/// What the units of a cube share besides tiles.
#[derive(CubeType)]
pub struct Shares {
    /// Of the queries in the ring: for each stage `-lse` of every query, then `delta`.
    pub sums: Shared<[f32]>,
    /// The gradients of the scores of the last steps.
    pub slopes: Shared<[Pair]>,
    /// A step's gradients of the queries on their way to memory, half of the columns each warpgroup.
    pub stage: Shared<[Quad]>,
    /// Barriers: both warpgroups have written their part.
    pub there: Shared<[u64]>,
}

/// Descriptors of the warpgroup's keys and values and of the first query and output gradient tile; some also as columns
/// to sum over.
#[derive(CubeType)]
pub struct Operands {
    pub k: u64,
    /// Of all keys, the warpgroup's half of the columns.
    pub k_columns: u64,
    pub v: u64,
    pub q: u64,
    pub q_columns: u64,
    pub out_gradient: u64,
    pub out_gradient_columns: u64,
    /// Of the warpgroup's keys.
    pub slopes: u64,
    /// Of all keys.
    pub slope_columns: u64,
}

/// What a unit holds of its warpgroup's 64 keys: two rows, of each every fourth pair of columns.
#[derive(CubeType)]
pub struct JointState {
    /// Scores, then probabilities.
    pub scores: Array<f32>,
    /// Gradients of the probabilities, then of the scores, then of half a query.
    pub slopes: Array<f32>,
    /// The probabilities in 16 bits.
    pub weights: Sequence<Array<u32>>,
    /// The gradient of the keys so far, not yet scaled.
    pub k_sum: Array<f32>,
    /// The gradient of the values so far.
    pub v_sum: Array<f32>,
}

/// How many numbers the statistics of a block begin early.
#[cube]
fn early(source: &Source, #[comptime] plan: JointGradientPlan) -> u32 {
    if comptime![plan.variant.packed] { source.row % 4 } else { 0u32.runtime() }
}

/// Starts the copy of the tiles of step `step`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn load(
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
    let at = query_walk::block(source, step, BLOCK);
    let from = slot.stage * comptime![plan.statistics()];
    tile::load(q_ring, &slot, q, source.batch, at.head, at.row, comptime![(8 * plan.line()) as u32], BLOCK, D);
    let target = shared.sums.slice_mut(from, from + comptime![2 * plan.line()]);
    let from_row = at.row - early(source, plan) as i32;
    barrier_at(&q_ring.full, slot.stage).tma_load_3d(sums, target, 0, at.row_of_heads, from_row);
    tile::load(g_ring, &slot, out_gradient, source.batch, at.head, at.row, 0u32, BLOCK, D);
}

/// One query block. Its last products still run when this returns, and are waited for in the next step, which also adds
/// the queries' gradients to `target`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn advance(
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
    seen: &Seen,
    block_start: i32,
    #[comptime] plan: JointGradientPlan,
) {
    let element = comptime![plan.variant.element];
    let slot = tile::slot(step, plan.stages);
    let offset = tile::offset(&slot, BLOCK, D);
    let line = comptime![plan.line()];
    let column = slot.stage * comptime![plan.statistics()] + (early(source, plan) + (UNIT_POS % 4) * 2) as usize;

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
        hide(&mut state.scores, seen, block_start, plan);
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
            let delta = shared.sums[column + comptime![line + 8 * i + j]];
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
    // The queries of the step before: the other warpgroup has most likely come that far. In the first step this reads
    // what happens to be there, and nobody takes the result.
    if step > 0 {
        wait_for_slopes(shared, step - 1);
    }
    let columns = at.slope_columns + place_of(step + comptime![PLACES as u32 - 1]);
    issue_query_gradient(&mut state.slopes, columns, bulk::descriptor_here(at.k_columns), element);
}
