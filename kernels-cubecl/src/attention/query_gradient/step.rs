//! A step: the keys of a block with the cube's queries.
use super::QueryGradientPlan;
use crate::attention::draw;
use crate::attention::tile::{self, Draws, Ring};
use crate::attention::walk::{self, Fixed};
use crate::hopper::mma;
use crate::hopper::ptx;
use cubecl::prelude::*;
use half::bf16;

/// Descriptors of the warpgroup's rows and of the first key and value tile; the keys also as columns to sum over.
#[derive(CubeType)]
pub struct Operands {
    pub q: u64,
    pub out_gradient: u64,
    pub k: u64,
    pub k_columns: u64,
    pub v: u64,
}

/// What a unit holds of its warpgroup's 64 rows: two rows, of each every fourth pair of columns.
#[derive(CubeType)]
pub struct RowState {
    /// Scores, then probabilities.
    pub scores: Array<f32>,
    /// Gradients of the probabilities, then of the scores.
    pub slopes: Array<f32>,
    /// The gradients of the scores in 16 bits.
    pub operand: Sequence<Array<u32>>,
    /// The gradient of the queries so far, not yet scaled.
    pub sum: Array<f32>,
    /// `-lse` in powers of two.
    pub shift: Array<f32>,
    pub delta: Array<f32>,
    /// Keys of dropout.
    pub draws: Draws,
}

/// One key block. Its last product still runs when this returns, and is waited for in the next step.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn advance(
    state: &mut RowState,
    k_ring: &mut Ring,
    v_ring: &mut Ring,
    fixed: &Fixed<Operands>,
    k: &TensorMap<bf16, Tiled>,
    v: &TensorMap<bf16, Tiled>,
    step: u32,
    edge: bool,
    #[comptime] plan: QueryGradientPlan,
) {
    let variant = comptime![plan.variant];
    let (block, element) = (plan.block, variant.element);
    let slot = tile::slot(step, plan.stages);
    let k_offset = tile::offset(&slot, block, comptime![variant.key_width()]);
    let v_offset = tile::offset(&slot, block, comptime![variant.value_width()]);

    tile::arrived(k_ring, &slot);
    tile::issue_scores(&mut state.scores, fixed.at.q, fixed.at.k + k_offset, block, variant.head_dim, element);
    tile::arrived(v_ring, &slot);
    tile::issue_scores(
        &mut state.slopes,
        fixed.at.out_gradient,
        fixed.at.v + v_offset,
        block,
        variant.value_dim,
        element,
    );
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
        if next < fixed.source.count {
            walk::load(k_ring, k, &fixed.source, next, variant.head_dim, block, plan.stages);
            walk::load(v_ring, v, &fixed.source, next, variant.value_dim, block, plan.stages);
        }
    }
    let column = walk::mask(&mut state.scores, fixed, step, edge, block, variant);
    #[unroll]
    for i in 0..comptime![block / 2] {
        let shift = state.shift[comptime![(i / 2) % 2]];
        state.scores[i] = ptx::exp2(fma(state.scores[i], fixed.scale_log2, shift));
    }
    mma::wait(0usize);
    mma::pin(&mut state.slopes);
    tile::release(v_ring, &slot);
    let number = fixed.source.first_column + draw::spread(column);
    #[unroll]
    for i in 0..comptime![block / 2] {
        let mut slope = state.slopes[i];
        if comptime![variant.dropout] {
            slope = select(tile::survives(&state.draws, number, fixed.source.limit, i), slope * fixed.source.keep, 0.0);
        }
        state.slopes[i] = state.scores[i] * (slope - state.delta[comptime![(i / 2) % 2]]);
    }
    tile::pack_operand(&mut state.operand, &state.slopes, block, false, element);
    tile::issue_product(
        &mut state.sum,
        &mut state.operand,
        fixed.at.k_columns + k_offset,
        block,
        variant.head_dim,
        element,
    );
}
