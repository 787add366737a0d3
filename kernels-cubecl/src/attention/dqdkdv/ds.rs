//! dS in shared memory, which both warpgroups write, and the GEMM that reads it there.
use super::buffers::SharedBuffers;
use super::plan::{DS_STAGES, DqDkDvPlan};
use crate::hopper::mma::{self, Pair};
use crate::{hopper::barrier::barrier_at, hopper::bulk, tiling::CUBE_KEYS};
use cubecl::prelude::*;

/// Waits until both warpgroups have written dS of step `step`.
#[cube]
pub fn wait_for_ds(shared: &mut SharedBuffers, step: u32) {
    let stages = comptime![DS_STAGES as u32];
    barrier_at(&shared.ds_full, (step % stages) as usize).wait_parity((step / stages) % 2);
}

/// Offset of the dS stage of step `step` from the descriptor of the first stage.
#[cube]
pub fn ds_offset(step: u32, #[comptime] plan: DqDkDvPlan) -> u64 {
    (step % comptime![DS_STAGES as u32]) as u64 * comptime![(2 * plan.ds_tile() * 4 / 16) as u64]
}

/// Writes the warpgroup's 64 keys of `ds` to `tile`, one line per key.
#[cube]
pub fn store_ds(ds: &Sequence<Array<u32>>, tile: &mut [Pair], #[comptime] block: usize) {
    let layout = comptime![mma::k_major(mma::ROWS, block)];
    let unit = bulk::opaque(UNIT_POS % 128);
    let lane = unit % 32;
    let first = (unit / 32) * 16 + lane / 4;
    #[unroll]
    for i in 0..comptime![block / 4] {
        let registers = ds.index(comptime![i / 4]);
        let line = first as usize + comptime![8 * (i % 2)];
        let along = comptime![(i / 2) * 8] + ((lane % 4) * 2) as usize;
        tile[layout.offset(line, along, 2usize) / 2] = Pair::reinterpret(registers[comptime![i % 4]]);
    }
}

/// Starts `acc_dq = dsᵀ · k` over all 128 keys: the warpgroup's 64 queries and 64 columns.
#[cube]
pub fn issue_dq(acc: &mut Array<f32>, ds_t: u64, k_t: u64, #[comptime] plan: DqDkDvPlan) {
    let a_layout = comptime![mma::mn_major(plan.block(), mma::ROWS)];
    let b_layout = comptime![mma::mn_major(plan.head_dim(), mma::ROWS)];
    mma::fill(acc, 0.0, comptime![mma::ROWS / 2]);
    mma::pin(acc);
    mma::fence();
    #[unroll]
    for s in 0..comptime![CUBE_KEYS / mma::STEP] {
        // dS and K are one tile per warpgroup.
        let (tile, key) = comptime![(s * mma::STEP / mma::ROWS, s * mma::STEP % mma::ROWS)];
        let a = ds_t + comptime![(tile * plan.ds_tile() * 4 / 16) as u64 + mma::advance(a_layout, 0, key)];
        let b = k_t + comptime![(tile * plan.k_tile() * 4 / 16) as u64 + mma::advance(b_layout, 0, key)];
        mma::mma(acc, a, b, comptime![mma::ROWS], a_layout.major, b_layout.major, comptime![plan.variant.element]);
    }
    mma::commit();
}
