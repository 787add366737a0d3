//! A step: the scores of a block of keys, their softmax, and the product with the values.
use super::ForwardPlan;
use crate::attention::draw;
use crate::attention::tile::{self, Draws, HIDDEN, Ring};
use crate::attention::walk::{self, Fixed, Source};
use crate::hopper::mma;
use crate::hopper::ptx;
use cubecl::prelude::*;
use half::bf16;

/// Hardware barriers of the turns of the two warpgroups.
pub const FIRST_TURN: u32 = 2;
const SECOND_TURN: u32 = 3;

/// Descriptors of the warpgroup's queries and of the first key and value tile.
#[derive(CubeType)]
pub struct Operands {
    pub q: u64,
    pub k: u64,
    pub v: u64,
}

/// What a unit holds of its warpgroup's 64 rows: two rows, of each every fourth pair of columns.
#[derive(CubeType)]
pub struct RowState {
    /// Scores, then their exponentials.
    pub scores: Array<f32>,
    /// The output so far, not yet divided by `total`.
    pub sum: Array<f32>,
    /// The exponentials in bf16: the left operand of the product with the values.
    pub weights: Sequence<Array<u32>>,
    /// Greatest score of each row.
    pub top: Array<f32>,
    /// This unit's part of each row's sum of exponentials.
    pub total: Array<f32>,
    /// What the last softmax asks the output so far to be multiplied with.
    pub factor: Array<f32>,
    /// Keys of dropout.
    pub draws: Draws,
}

/// Step `step`: the scores of its key block, under whose softmax runs the product of the block before with its values.
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
    #[comptime] plan: ForwardPlan,
) {
    let variant = comptime![plan.variant];
    let (block, d) = (plan.block, variant.head_dim);
    let k_slot = tile::slot(step, plan.stages);
    let v_slot = tile::slot(step - 1, plan.stages);

    tile::arrived(k_ring, &k_slot);
    if comptime![plan.turns] {
        if fixed.place.role == 0 {
            ptx::named_barrier_sync(FIRST_TURN, 256u32);
        } else {
            ptx::named_barrier_sync(SECOND_TURN, 256u32);
        }
    }
    let k_tile = fixed.at.k + tile::offset(&k_slot, block, comptime![variant.key_width()]);
    tile::issue_scores(&mut state.scores, fixed.at.q, k_tile, block, d, variant.element);
    tile::arrived(v_ring, &v_slot);
    let v_tile = fixed.at.v + tile::offset(&v_slot, block, comptime![variant.value_width()]);
    tile::issue_product(&mut state.sum, &mut state.weights, v_tile, block, variant.value_dim, variant.element);
    if comptime![plan.turns] {
        if fixed.place.role == 0 {
            ptx::named_barrier_arrive(SECOND_TURN, 256u32);
        } else {
            ptx::named_barrier_arrive(FIRST_TURN, 256u32);
        }
    }
    if UNIT_POS == 0 {
        // With three stages, what these tiles replace was last read two steps ago.
        if step + 1 < fixed.source.count {
            walk::load(k_ring, k, &fixed.source, step + 1, d, block, plan.stages);
        }
        walk::load(v_ring, v, &fixed.source, step, variant.value_dim, block, plan.stages);
    }
    mma::wait(1usize);
    mma::pin(&mut state.scores);
    tile::release(k_ring, &k_slot);
    let column = walk::mask(&mut state.scores, fixed, step, edge, block, variant);
    softmax(state, &fixed.source, column, fixed.scale_log2, plan);
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
pub fn softmax(state: &mut RowState, source: &Source, column: u32, scale_log2: f32, #[comptime] plan: ForwardPlan) {
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
