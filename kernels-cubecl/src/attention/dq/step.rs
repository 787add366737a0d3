//! One step of the loop: a kv block against the cube's queries.
use super::DqPlan;
use crate::attention::kv_blocks::{self, LoopInvariants};
use crate::attention::tile::{self, Ring, RowDropoutKeys};
use crate::{attention::dropout, hopper::mma, hopper::ptx};
use cubecl::prelude::*;
use half::bf16;

/// Shared-memory descriptors of the warpgroup's Q and dO tile and of the first K and V tile; K also transposed.
#[derive(CubeType)]
pub struct Descriptors {
    pub q: u64,
    pub dout: u64,
    pub k: u64,
    pub k_t: u64,
    pub v: u64,
}

/// Registers of a unit: two rows (queries) of its warpgroup's 64, of each every fourth pair of columns.
#[derive(CubeType)]
pub struct DqState {
    /// S, then P.
    pub acc_s: Array<f32>,
    /// dP, then dS.
    pub acc_dp: Array<f32>,
    /// dS in 16 bits.
    pub ds: Sequence<Array<u32>>,
    /// Accumulator of dQ, not yet scaled.
    pub acc_dq: Array<f32>,
    /// `-lse · log₂ e` of both rows.
    pub neg_lse: Array<f32>,
    pub delta: Array<f32>,
    /// Dropout keys of both rows.
    pub dropout_keys: RowDropoutKeys,
}

/// One kv block. Its last GEMM still runs when this returns; the next step waits for it.
#[cube]
pub fn advance(
    state: &mut DqState,
    k_ring: &mut Ring,
    v_ring: &mut Ring,
    invariants: &LoopInvariants<Descriptors>,
    k: &TensorMap<bf16, Tiled>,
    v: &TensorMap<bf16, Tiled>,
    step: u32,
    masked: bool,
    #[comptime] plan: DqPlan,
) {
    let variant = comptime![plan.variant];
    let (block, element) = (plan.block, variant.element);
    let slot = tile::slot(step, plan.stages);
    let k_offset = tile::offset(&slot, block, comptime![variant.key_width()]);
    let v_offset = tile::offset(&slot, block, comptime![variant.value_width()]);

    tile::wait_full(k_ring, &slot);
    tile::issue_gemm_ss(
        &mut state.acc_s,
        invariants.desc.q,
        invariants.desc.k + k_offset,
        block,
        variant.head_dim,
        element,
    );
    tile::wait_full(v_ring, &slot);
    tile::issue_gemm_ss(
        &mut state.acc_dp,
        invariants.desc.dout,
        invariants.desc.v + v_offset,
        block,
        variant.value_dim,
        element,
    );
    mma::wait(1usize);
    mma::pin(&mut state.acc_s);
    tile::pin_operand(&mut state.ds, block);
    if step > 0 {
        // The GEMM of the previous step is done too: its K stage is free.
        let before = tile::slot(step - 1, plan.stages);
        tile::release(k_ring, &before);
    }
    if UNIT_POS == 0 {
        let next = step + comptime![plan.stages as u32 - 1];
        if next < invariants.kv_loop.count {
            kv_blocks::load(k_ring, k, &invariants.kv_loop, next, variant.head_dim, block, plan.stages);
            kv_blocks::load(v_ring, v, &invariants.kv_loop, next, variant.value_dim, block, plan.stages);
        }
    }
    let column = kv_blocks::mask_block(&mut state.acc_s, invariants, step, masked, block, variant);
    #[unroll]
    for i in 0..comptime![block / 2] {
        let neg_lse = state.neg_lse[comptime![(i / 2) % 2]];
        state.acc_s[i] = ptx::exp2(fma(state.acc_s[i], invariants.scale_log2, neg_lse));
    }
    mma::wait(0usize);
    mma::pin(&mut state.acc_dp);
    tile::release(v_ring, &slot);
    let spread = invariants.kv_loop.first_column + dropout::spread(column);
    #[unroll]
    for i in 0..comptime![block / 2] {
        let mut dp = state.acc_dp[i];
        if comptime![variant.dropout] {
            dp = select(
                tile::is_kept(&state.dropout_keys, spread, invariants.kv_loop.drop_threshold, i),
                dp * invariants.kv_loop.keep_scale,
                0.0,
            );
        }
        state.acc_dp[i] = state.acc_s[i] * (dp - state.delta[comptime![(i / 2) % 2]]);
    }
    tile::pack_operand(&mut state.ds, &state.acc_dp, block, false, element);
    tile::issue_gemm_rs(
        &mut state.acc_dq,
        &mut state.ds,
        invariants.desc.k_t + k_offset,
        block,
        variant.head_dim,
        element,
    );
}
