//! One step of the loop: a q block against the cube's keys.
use super::DkDvPlan;
use super::mask::{VisibleQueries, apply_mask};
use crate::attention::dropout;
use crate::attention::q_blocks::{self, QLoop};
use crate::attention::tile::{self, Ring};
use crate::hopper::{barrier::barrier_at, mma, ptx};
use cubecl::prelude::*;
use half::bf16;

/// Statistics of the queries in the ring. Of each stage: `-lse · log₂ e` of every query, then `delta`; and both dropout
/// keys.
#[derive(CubeType)]
pub struct StatsRing {
    pub lse_delta: Shared<[f32]>,
    pub dropout_keys: Shared<[u32]>,
}

/// Shared-memory descriptors of the warpgroup's K and V tile and of the first Q and dO tile, the last two also
/// transposed.
#[derive(CubeType)]
pub struct Descriptors {
    pub k: u64,
    pub v: u64,
    pub q: u64,
    pub q_t: u64,
    pub dout: u64,
    pub dout_t: u64,
}

/// Registers of a unit: two rows (keys) of its warpgroup's 64, of each every fourth pair of columns.
#[derive(CubeType)]
pub struct DkDvState {
    /// Sᵀ, then Pᵀ; negative where dropout drops.
    pub acc_s: Array<f32>,
    /// dPᵀ, then dSᵀ.
    pub acc_dp: Array<f32>,
    /// Pᵀ in 16 bits.
    pub p: Sequence<Array<u32>>,
    /// dSᵀ in 16 bits.
    pub ds: Sequence<Array<u32>>,
    /// Accumulator of dK, not yet scaled.
    pub acc_dk: Array<f32>,
    /// Accumulator of dV.
    pub acc_dv: Array<f32>,
}

/// How many numbers before the block its loaded statistics begin.
#[cube]
fn stats_skew(q_loop: &QLoop, #[comptime] plan: DkDvPlan) -> u32 {
    if comptime![plan.variant.packed] { q_loop.row % 4 } else { 0u32.runtime() }
}

/// Starts the TMA loads of step `step`.
#[cube]
pub fn load(
    q_ring: &mut Ring,
    dout_ring: &mut Ring,
    stats: &mut StatsRing,
    q: &TensorMap<bf16, Tiled>,
    dout: &TensorMap<bf16, Tiled>,
    lse_delta: &TensorMap<f32, Tiled>,
    dropout_keys: &TensorMap<u32, Tiled>,
    q_loop: &QLoop,
    step: u32,
    #[comptime] plan: DkDvPlan,
) {
    let variant = comptime![plan.variant];
    let block = comptime![plan.block];
    let slot = tile::slot(step, plan.stages);
    let at = q_blocks::q_block(q_loop, step, block);
    let more = comptime![(8 * plan.stats_width()) as u32 * (1 + variant.dropout as u32)];
    let from = slot.stage * comptime![plan.stats_len()];
    let to = from + comptime![2 * plan.stats_width()];
    let from_row = at.row - stats_skew(q_loop, plan) as i32;
    tile::load(q_ring, &slot, q, q_loop.batch, at.head, at.row, more, block, variant.head_dim);
    let full = barrier_at(&q_ring.full, slot.stage);
    full.tma_load_3d(lse_delta, stats.lse_delta.slice_mut(from, to), 0, at.stats_row, from_row);
    if comptime![variant.dropout] {
        full.tma_load_3d(dropout_keys, stats.dropout_keys.slice_mut(from, to), 0, at.stats_row, from_row);
    }
    tile::load(dout_ring, &slot, dout, q_loop.batch, at.head, at.row, 0u32, block, variant.value_dim);
}

/// One q block. Its last GEMMs still run when this returns; the next step waits for them.
#[cube]
pub fn advance(
    state: &mut DkDvState,
    q_ring: &mut Ring,
    dout_ring: &mut Ring,
    stats: &mut StatsRing,
    q_loop: &QLoop,
    desc: &Descriptors,
    q: &TensorMap<bf16, Tiled>,
    dout: &TensorMap<bf16, Tiled>,
    lse_delta: &TensorMap<f32, Tiled>,
    dropout_keys: &TensorMap<u32, Tiled>,
    step: u32,
    scale_log2: f32,
    masked: bool,
    visible: &VisibleQueries,
    block_start: i32,
    spread: u32,
    #[comptime] plan: DkDvPlan,
) {
    let variant = comptime![plan.variant];
    let (block, element) = (plan.block, variant.element);
    let slot = tile::slot(step, plan.stages);
    let q_offset = tile::offset(&slot, block, comptime![variant.key_width()]);
    let dout_offset = tile::offset(&slot, block, comptime![variant.value_width()]);
    let width = comptime![plan.stats_width()];
    let column = slot.stage * comptime![plan.stats_len()] + (stats_skew(q_loop, plan) + (UNIT_POS % 4) * 2) as usize;

    tile::wait_full(q_ring, &slot);
    tile::issue_gemm_ss(&mut state.acc_s, desc.k, desc.q + q_offset, block, variant.head_dim, element);
    tile::wait_full(dout_ring, &slot);
    if comptime![plan.early_dp && plan.has_dk()] {
        tile::issue_gemm_ss(&mut state.acc_dp, desc.v, desc.dout + dout_offset, block, variant.value_dim, element);
        mma::wait(1usize);
    } else {
        mma::wait(0usize);
    }
    mma::pin(&mut state.acc_s);
    if comptime![plan.has_dv()] {
        tile::pin_operand(&mut state.p, block);
    }
    if comptime![plan.has_dk()] {
        tile::pin_operand(&mut state.ds, block);
    }
    if comptime![!plan.early_dp && plan.has_dk()] {
        tile::issue_gemm_ss(&mut state.acc_dp, desc.v, desc.dout + dout_offset, block, variant.value_dim, element);
    }
    if step > 0 {
        // The GEMMs of the previous step are done too: its stages are free.
        let before = tile::slot(step - 1, plan.stages);
        tile::release(q_ring, &before);
        tile::release(dout_ring, &before);
    }
    if UNIT_POS == 0 {
        let next = step + comptime![plan.stages as u32 - 1];
        if next < q_loop.steps {
            load(q_ring, dout_ring, stats, q, dout, lse_delta, dropout_keys, q_loop, next, plan);
        }
    }
    if masked {
        apply_mask(&mut state.acc_s, visible, block_start, plan);
    }
    #[unroll]
    for i in 0..comptime![block / 8] {
        #[unroll]
        for j in 0..2usize {
            let neg_lse = stats.lse_delta[column + comptime![8 * i + j]];
            #[unroll]
            for half in 0..2usize {
                let index = comptime![4 * i + 2 * half + j];
                state.acc_s[index] = ptx::exp2(fma(state.acc_s[index], scale_log2, neg_lse));
            }
            if comptime![variant.dropout] {
                let first = stats.dropout_keys[column + comptime![8 * i + j]];
                let second = stats.dropout_keys[column + comptime![width + 8 * i + j]];
                #[unroll]
                for half in 0..2usize {
                    let index = comptime![4 * i + 2 * half + j];
                    let spread_column = spread + comptime![dropout::spread_by(8 * half)];
                    let p = state.acc_s[index];
                    state.acc_s[index] =
                        select(dropout::dropout_hash(spread_column, first, second) >= q_loop.drop_threshold, p, -p);
                }
            }
        }
    }
    if comptime![plan.has_dv()] {
        let dout_tile = desc.dout_t + dout_offset;
        tile::pack_operand(&mut state.p, &state.acc_s, block, variant.dropout, element);
        tile::issue_gemm_rs(&mut state.acc_dv, &mut state.p, dout_tile, block, variant.value_dim, element);
    }
    if comptime![plan.has_dk()] {
        if comptime![plan.has_dv()] {
            mma::wait(1usize);
        } else {
            mma::wait(0usize);
        }
        mma::pin(&mut state.acc_dp);
        #[unroll]
        for i in 0..comptime![block / 8] {
            #[unroll]
            for j in 0..2usize {
                let delta = stats.lse_delta[column + comptime![width + 8 * i + j]];
                #[unroll]
                for half in 0..2usize {
                    let index = comptime![4 * i + 2 * half + j];
                    let mut p = state.acc_s[index];
                    let mut dp = state.acc_dp[index];
                    if comptime![variant.dropout] {
                        dp = select(p > 0.0, dp * q_loop.keep_scale, 0.0);
                        p = p.abs();
                    }
                    state.acc_dp[index] = p * (dp - delta);
                }
            }
        }
        tile::pack_operand(&mut state.ds, &state.acc_dp, block, false, element);
        tile::issue_gemm_rs(&mut state.acc_dk, &mut state.ds, desc.q_t + q_offset, block, variant.head_dim, element);
    }
}
