//! A step: the queries of a block with the cube's keys.
use super::KeyGradientPlan;
use super::mask::{Seen, hide};
use crate::attention::draw;
use crate::attention::query_walk::{self, Source};
use crate::attention::tile::{self, Ring};
use crate::hopper::mma;
use crate::hopper::ptx;
use crate::hopper::ring::barrier_at;
use cubecl::prelude::*;
use half::bf16;

/// What comes with the queries in the ring: for each stage `-lse` of every query, then `delta`; and the two dropout
/// keys.
#[derive(CubeType)]
pub struct Statistics {
    pub sums: Shared<[f32]>,
    pub drop_keys: Shared<[u32]>,
}

/// Descriptors of the warpgroup's keys and values and of the first query and output gradient tile; the last two also as
/// columns to sum over.
#[derive(CubeType)]
pub struct Operands {
    pub k: u64,
    pub v: u64,
    pub q: u64,
    pub q_columns: u64,
    pub out_gradient: u64,
    pub out_gradient_columns: u64,
}

/// What a unit holds of its warpgroup's 64 keys: two rows, of each every fourth pair of columns.
#[derive(CubeType)]
pub struct KeyState {
    /// Scores, then probabilities, negative where dropped.
    pub scores: Array<f32>,
    /// Gradients of the probabilities, then of the scores.
    pub slopes: Array<f32>,
    /// The probabilities in 16 bits.
    pub weights: Sequence<Array<u32>>,
    /// The gradients of the scores in 16 bits.
    pub operand: Sequence<Array<u32>>,
    /// The gradient of the keys so far, not yet scaled.
    pub k_sum: Array<f32>,
    /// The gradient of the values so far.
    pub v_sum: Array<f32>,
}

/// How many numbers the statistics of a block begin early.
#[cube]
fn early(source: &Source, #[comptime] plan: KeyGradientPlan) -> u32 {
    if comptime![plan.variant.packed] { source.row % 4 } else { 0u32.runtime() }
}

/// Starts the copy of the tiles of step `step`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn load(
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
    let at = query_walk::block(source, step, block);
    let more = comptime![(8 * plan.line()) as u32 * (1 + variant.dropout as u32)];
    let from = slot.stage * comptime![plan.statistics()];
    let to = from + comptime![2 * plan.line()];
    let from_row = at.row - early(source, plan) as i32;
    tile::load(q_ring, &slot, q, source.batch, at.head, at.row, more, block, variant.head_dim);
    let full = barrier_at(&q_ring.full, slot.stage);
    full.tma_load_3d(sums, statistics.sums.slice_mut(from, to), 0, at.row_of_heads, from_row);
    if comptime![variant.dropout] {
        full.tma_load_3d(drop_keys, statistics.drop_keys.slice_mut(from, to), 0, at.row_of_heads, from_row);
    }
    tile::load(g_ring, &slot, out_gradient, source.batch, at.head, at.row, 0u32, block, variant.value_dim);
}

/// One query block. Its last products still run when this returns, and are waited for in the next step.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn advance(
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
