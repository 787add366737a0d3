//! One step of the loop: the scores of a kv block, their softmax, and P V.
use super::ForwardPlan;
use crate::attention::kv_blocks::{self, KvLoop, LoopInvariants};
use crate::attention::masks::{self, RowMasks};
use crate::attention::tile::{self, MASKED, Ring, RowDropoutKeys};
use crate::{attention::dropout, hopper::mma, hopper::ptx};
use cubecl::prelude::*;
use half::bf16;

/// Named barriers of the ping-pong schedule, one per warpgroup.
pub const PING_PONG_0: u32 = 2;
const PING_PONG_1: u32 = 3;

/// Shared-memory descriptors of the warpgroup's Q tile and of the first K and V tile.
#[derive(CubeType)]
pub struct Descriptors {
    pub q: u64,
    pub k: u64,
    pub v: u64,
}

/// Registers of a unit: two rows (queries) of its warpgroup's 64, of each every fourth pair of columns.
#[derive(CubeType)]
pub struct SoftmaxState {
    /// S, then P, not yet divided by `row_sum`.
    pub acc_s: Array<f32>,
    /// Accumulator of the output, not yet divided by `row_sum`.
    pub acc_o: Array<f32>,
    /// P in 16 bits: the left operand of P V.
    pub p: Sequence<Array<u32>>,
    /// Greatest score of each row so far (m).
    pub row_max: Array<f32>,
    /// This unit's part of each row's sum of exponentials (l).
    pub row_sum: Array<f32>,
    /// Factor by which the last softmax rescales `acc_o`.
    pub o_scale: Array<f32>,
    /// Dropout keys of both rows.
    pub dropout_keys: RowDropoutKeys,
    /// Bits of scores that are hidden, in both rows.
    pub hidden: RowMasks,
    /// Bits of probabilities that are kept.
    pub kept: RowMasks,
}

/// Step `step`: the scores of its kv block; P V of the previous kv block runs under their softmax.
#[cube]
pub fn advance(
    state: &mut SoftmaxState,
    k_ring: &mut Ring,
    v_ring: &mut Ring,
    invariants: &LoopInvariants<Descriptors>,
    k: &TensorMap<bf16, Tiled>,
    v: &TensorMap<bf16, Tiled>,
    hidden: &[u32],
    kept: &[u32],
    step: u32,
    masked: bool,
    #[comptime] plan: ForwardPlan,
) {
    let variant = comptime![plan.variant];
    let (block, d) = (plan.block, variant.head_dim);
    let k_slot = tile::slot(step, plan.stages);
    let v_slot = tile::slot(step - 1, plan.stages);

    tile::wait_full(k_ring, &k_slot);
    if comptime![plan.ping_pong] {
        if invariants.fragment.warpgroup == 0 {
            ptx::named_barrier_sync(PING_PONG_0, 256u32);
        } else {
            ptx::named_barrier_sync(PING_PONG_1, 256u32);
        }
    }
    let k_tile = invariants.desc.k + tile::offset(&k_slot, block, comptime![variant.key_width()]);
    tile::issue_gemm_ss(&mut state.acc_s, invariants.desc.q, k_tile, block, d, variant.element);
    tile::wait_full(v_ring, &v_slot);
    let v_tile = invariants.desc.v + tile::offset(&v_slot, block, comptime![variant.value_width()]);
    tile::issue_gemm_rs(&mut state.acc_o, &mut state.p, v_tile, block, variant.value_dim, variant.element);
    if comptime![plan.ping_pong] {
        if invariants.fragment.warpgroup == 0 {
            ptx::named_barrier_arrive(PING_PONG_1, 256u32);
        } else {
            ptx::named_barrier_arrive(PING_PONG_0, 256u32);
        }
    }
    if UNIT_POS == 0 {
        // With three stages, these loads overwrite tiles that were last read two steps ago.
        if step + 1 < invariants.kv_loop.count {
            kv_blocks::load(k_ring, k, &invariants.kv_loop, step + 1, d, block, plan.stages);
        }
        kv_blocks::load(v_ring, v, &invariants.kv_loop, step, variant.value_dim, block, plan.stages);
    }
    mma::wait(1usize);
    mma::pin(&mut state.acc_s);
    tile::release(k_ring, &k_slot);
    let column = kv_blocks::mask_block(&mut state.acc_s, invariants, step, masked, block, variant);
    softmax(state, &invariants.kv_loop, hidden, kept, column, invariants.scale_log2, plan);
    if comptime![plan.intra_wg_overlap] {
        // ptxas moves the exponentials after the wait, which serialises them with P V, unless a branch that needs them
        // stands between.
        if plane_any(state.row_sum[0] + state.row_sum[1] < 0.0) {
            ptx::trap();
        }
    }
    mma::wait(0usize);
    mma::pin(&mut state.acc_o);
    tile::release(v_ring, &v_slot);
    #[unroll]
    for i in 0..comptime![variant.value_dim / 2] {
        state.acc_o[i] = state.acc_o[i] * state.o_scale[comptime![(i / 2) % 2]];
    }
    tile::pack_operand(&mut state.p, &state.acc_s, block, false, variant.element);
}

/// One step of the online softmax: `acc_s` becomes P over the greatest score so far, 0 where dropout drops. `row_sum`
/// counts dropped probabilities too. `column` is the key of the unit's first score.
#[cube]
pub fn softmax(
    state: &mut SoftmaxState,
    kv_loop: &KvLoop,
    hidden: &[u32],
    kept: &[u32],
    column: u32,
    scale_log2: f32,
    #[comptime] plan: ForwardPlan,
) {
    if comptime![plan.variant.hidden] {
        masks::replace(&mut state.acc_s, hidden, &state.hidden, column, MASKED, true, plan.block);
    }
    let spread = kv_loop.first_column + dropout::spread(column);
    #[unroll]
    for half in 0..2usize {
        let previous_max = state.row_max[half];
        let mut row_max = previous_max;
        #[unroll]
        for i in 0..comptime![plan.block / 4] {
            row_max = max(row_max, state.acc_s[comptime![(i / 2) * 4 + half * 2 + i % 2]]);
        }
        row_max = max(row_max, plane_shuffle_xor(row_max, 1u32));
        row_max = max(row_max, plane_shuffle_xor(row_max, 2u32));
        state.row_max[half] = row_max;
        let rescale = ptx::exp2((previous_max - row_max) * scale_log2);
        // While a row has seen no visible key, all its exponentials are zero.
        let neg_max = select(row_max == MASKED, 0.0, -row_max * scale_log2);
        let mut row_sum = state.row_sum[half] * rescale;
        #[unroll]
        for i in 0..comptime![plan.block / 4] {
            let index = comptime![(i / 2) * 4 + half * 2 + i % 2];
            let p = ptx::exp2(fma(state.acc_s[index], scale_log2, neg_max));
            row_sum += p;
            if comptime![plan.variant.dropout] {
                state.acc_s[index] =
                    select(tile::is_kept(&state.dropout_keys, spread, kv_loop.drop_threshold, index), p, 0.0);
            } else {
                state.acc_s[index] = p;
            }
        }
        state.row_sum[half] = row_sum;
        state.o_scale[half] = rescale;
    }
    if comptime![plan.variant.kept] {
        masks::replace(&mut state.acc_s, kept, &state.kept, column, 0.0, false, plan.block);
    }
}
