//! One step of the loop: a q block against the cube's keys.
use super::buffers::SharedBuffers;
use super::ds::{ds_offset, issue_dq, store_ds, wait_for_ds};
use super::mask::{VisibleQueries, apply_mask};
use super::plan::{DS_STAGES, DqDkDvPlan};
use crate::attention::dq_accum::{reduce_dq, sync_warpgroup};
use crate::attention::masks::{self, BitRows, row_masks};
use crate::attention::q_blocks::{self, QLoop};
use crate::attention::tile::{self, MASKED, Ring};
use crate::hopper::bulk::{self, Quad};
use crate::hopper::{barrier::barrier_at, mma, ptx};
use cubecl::prelude::*;
use half::bf16;

/// Shared-memory descriptors of the warpgroup's K and V tile and of the first Q and dO tile, some also transposed.
#[derive(CubeType)]
pub struct Descriptors {
    pub k: u64,
    /// All 128 keys, the columns of the warpgroup's dQ.
    pub k_t: u64,
    pub v: u64,
    pub q: u64,
    pub q_t: u64,
    pub dout: u64,
    pub dout_t: u64,
    /// All 128 keys, the queries of the warpgroup's dQ.
    pub ds_t: u64,
}

/// Registers of a unit: two rows (keys) of its warpgroup's 64, of each every fourth pair of columns.
#[derive(CubeType)]
pub struct DqDkDvState {
    /// Sᵀ, then Pᵀ.
    pub acc_s: Array<f32>,
    /// dPᵀ, then dSᵀ.
    pub acc_dp: Array<f32>,
    /// Pᵀ in 16 bits.
    pub p: Sequence<Array<u32>>,
    /// dSᵀ in 16 bits.
    pub ds: Sequence<Array<u32>>,
    /// 64 queries and 64 columns of dQ.
    pub acc_dq: Array<f32>,
    /// Accumulator of dK, not yet scaled.
    pub acc_dk: Array<f32>,
    /// Accumulator of dV.
    pub acc_dv: Array<f32>,
}

/// How many numbers before the block its loaded statistics begin.
#[cube]
fn stats_skew(q_loop: &QLoop, #[comptime] plan: DqDkDvPlan) -> u32 {
    if comptime![plan.variant.packed] { q_loop.row % 4 } else { 0u32.runtime() }
}

/// Starts the TMA loads of step `step`.
#[cube]
pub fn load(
    q_ring: &mut Ring,
    dout_ring: &mut Ring,
    shared: &mut SharedBuffers,
    q: &TensorMap<bf16, Tiled>,
    dout: &TensorMap<bf16, Tiled>,
    lse_delta: &TensorMap<f32, Tiled>,
    q_loop: &QLoop,
    step: u32,
    #[comptime] plan: DqDkDvPlan,
) {
    let slot = tile::slot(step, plan.stages);
    let (block, head_dim) = comptime![(plan.block(), plan.head_dim())];
    let at = q_blocks::q_block(q_loop, step, block);
    let from = slot.stage * comptime![plan.stats_len()];
    tile::load(
        q_ring,
        &slot,
        q,
        q_loop.batch,
        at.head,
        at.row,
        comptime![(8 * plan.stats_width()) as u32],
        block,
        head_dim,
    );
    let target = shared.lse_delta.slice_mut(from, from + comptime![2 * plan.stats_width()]);
    let from_row = at.row - stats_skew(q_loop, plan) as i32;
    barrier_at(&q_ring.full, slot.stage).tma_load_3d(lse_delta, target, 0, at.stats_row, from_row);
    tile::load(dout_ring, &slot, dout, q_loop.batch, at.head, at.row, 0u32, block, head_dim);
}

/// One q block. Its last GEMMs still run when this returns; the next step waits for them and adds dQ to `target`.
#[cube]
pub fn advance(
    state: &mut DqDkDvState,
    q_ring: &mut Ring,
    dout_ring: &mut Ring,
    shared: &mut SharedBuffers,
    q_loop: &QLoop,
    desc: &Descriptors,
    q: &TensorMap<bf16, Tiled>,
    dout: &TensorMap<bf16, Tiled>,
    lse_delta: &TensorMap<f32, Tiled>,
    dq_accum: &mut [Quad],
    hidden: &[u32],
    kept: &[u32],
    hidden_rows: &BitRows,
    kept_rows: &BitRows,
    row: u32,
    target: u32,
    step: u32,
    scale_log2: f32,
    masked: bool,
    visible: &VisibleQueries,
    block_start: i32,
    #[comptime] plan: DqDkDvPlan,
) {
    let (block, head_dim, element) = comptime![(plan.block(), plan.head_dim(), plan.variant.element)];
    let slot = tile::slot(step, plan.stages);
    let offset = tile::offset(&slot, block, head_dim);
    let width = comptime![plan.stats_width()];
    let column = slot.stage * comptime![plan.stats_len()] + (stats_skew(q_loop, plan) + (UNIT_POS % 4) * 2) as usize;

    tile::wait_full(q_ring, &slot);
    tile::issue_gemm_ss(&mut state.acc_s, bulk::opaque_descriptor(desc.k), desc.q + offset, block, head_dim, element);
    mma::wait(0usize);
    mma::pin(&mut state.acc_s);
    mma::pin(&mut state.acc_dk);
    mma::pin(&mut state.acc_dq);
    tile::pin_operand(&mut state.ds, block);
    if step > 0 {
        // The GEMMs of the previous step are done: its stages are free.
        let before = tile::slot(step - 1, plan.stages);
        tile::release(q_ring, &before);
        tile::release(dout_ring, &before);
    }
    if step > 1 {
        reduce_dq(dq_accum, target, &mut shared.dq_stage, &state.acc_dq);
    }
    if UNIT_POS == 0 {
        let next = step + comptime![plan.stages as u32 - 1];
        if next < q_loop.steps {
            load(q_ring, dout_ring, shared, q, dout, lse_delta, q_loop, next, plan);
        }
    }
    tile::wait_full(dout_ring, &slot);
    tile::issue_gemm_ss(
        &mut state.acc_dp,
        bulk::opaque_descriptor(desc.v),
        desc.dout + offset,
        block,
        head_dim,
        element,
    );
    if masked {
        apply_mask(&mut state.acc_s, visible, block_start, plan);
    }
    let query = block_start as u32 + (UNIT_POS % 4) * 2;
    let head = q_loop.head + step / q_loop.steps_per_head;
    if comptime![plan.variant.hidden] {
        let rows = row_masks(hidden_rows, q_loop.batch as u32, head, row);
        masks::replace(&mut state.acc_s, hidden, &rows, query, MASKED, true, block);
    }
    #[unroll]
    for i in 0..comptime![block / 8] {
        #[unroll]
        for j in 0..2usize {
            let neg_lse = shared.lse_delta[column + comptime![8 * i + j]];
            #[unroll]
            for half in 0..2usize {
                let index = comptime![4 * i + 2 * half + j];
                state.acc_s[index] = ptx::exp2(fma(state.acc_s[index], scale_log2, neg_lse));
            }
        }
    }
    mma::wait(0usize);
    mma::pin(&mut state.acc_dp);
    let kept_rows = row_masks(kept_rows, q_loop.batch as u32, head, row);
    if comptime![plan.variant.kept] {
        masks::replace(&mut state.acc_dp, kept, &kept_rows, query, 0.0, false, block);
    }
    #[unroll]
    for i in 0..comptime![block / 8] {
        #[unroll]
        for j in 0..2usize {
            let delta = shared.lse_delta[column + comptime![width + 8 * i + j]];
            #[unroll]
            for half in 0..2usize {
                let index = comptime![4 * i + 2 * half + j];
                if comptime![plan.variant.kept] {
                    state.acc_dp[index] = state.acc_dp[index] * q_loop.keep_scale;
                }
                state.acc_dp[index] = state.acc_s[index] * (state.acc_dp[index] - delta);
            }
        }
    }
    if comptime![plan.variant.kept] {
        masks::replace(&mut state.acc_s, kept, &kept_rows, query, 0.0, false, block);
    }
    // Not before dS: P in 32 and in 16 bits with dP would be more registers than there are.
    tile::pack_operand(&mut state.p, &state.acc_s, block, false, element);
    tile::issue_gemm_rs(&mut state.acc_dv, &mut state.p, desc.dout_t + offset, block, head_dim, element);
    tile::pack_operand(&mut state.ds, &state.acc_dp, block, false, element);
    let ds_stage = (step % comptime![DS_STAGES as u32]) as usize;
    let ds_tile = comptime![plan.ds_tile()];
    let own = (2 * ds_stage + (UNIT_POS / 128) as usize) * ds_tile;
    store_ds(&state.ds, shared.ds.slice_mut(own, own + ds_tile), block);
    sync_async_proxy_shared();
    sync_plane();
    if UNIT_POS % 32 == 0 {
        barrier_at(&shared.ds_full, ds_stage).arrive();
    }
    // The bulk reduction of the last step has long read the stage.
    if UNIT_POS % 128 == 0 {
        bulk::wait_for_reads();
    }
    sync_warpgroup();
    tile::issue_gemm_rs(&mut state.acc_dk, &mut state.ds, desc.q_t + offset, block, head_dim, element);
    // The GEMM for dV is done: the registers of P are free.
    mma::wait(1usize);
    mma::pin(&mut state.acc_dv);
    tile::pin_operand(&mut state.p, block);
    // dQ of the previous q block: the other warpgroup has most likely written its dS by now. The first step computes on
    // uninitialised dS, and the result is never used.
    if step > 0 {
        wait_for_ds(shared, step - 1);
    }
    let columns = desc.ds_t + ds_offset(step + comptime![DS_STAGES as u32 - 1], plan);
    issue_dq(&mut state.acc_dq, columns, bulk::opaque_descriptor(desc.k_t), plan);
}
