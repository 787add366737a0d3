//! dS in shared memory, which both warpgroups write, and the GEMMs that read it there.
use super::buffers::SharedBuffers;
use super::plan::{BLOCK, D, DS_STAGES, DS_TILE, K_TILE};
use crate::hopper::mma::{self, Half, Pair};
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
pub fn ds_offset(step: u32) -> u64 {
    (step % comptime![DS_STAGES as u32]) as u64 * comptime![(2 * DS_TILE * 4 / 16) as u64]
}

/// Writes the warpgroup's 64 keys of `ds` in 16 bits to `tile`, one line per key.
#[cube]
pub fn store_ds(ds: &Array<f32>, tile: &mut [Pair], #[comptime] element: Half) {
    let layout = comptime![mma::k_major(mma::ROWS, BLOCK)];
    let unit = bulk::opaque(UNIT_POS % 128);
    let lane = unit % 32;
    let first = (unit / 32) * 16 + lane / 4;
    #[unroll]
    for i in 0..comptime![BLOCK / 4] {
        let pair = mma::pack(ds[2 * i], ds[2 * i + 1], element);
        let line = first as usize + comptime![8 * (i % 2)];
        let along = comptime![(i / 2) * 8] + ((lane % 4) * 2) as usize;
        tile[layout.offset(line, along, 2usize) / 2] = Pair::reinterpret(pair);
    }
}

/// Starts `acc_dk += ds · q`: the warpgroup's 64 keys, over the queries of the block.
#[cube]
pub fn issue_dk(acc: &mut Array<f32>, ds: u64, q_t: u64, #[comptime] element: Half) {
    let a_layout = comptime![mma::k_major(mma::ROWS, BLOCK)];
    let b_layout = comptime![mma::mn_major(D, BLOCK)];
    mma::pin(acc);
    mma::fence();
    #[unroll]
    for s in 0..comptime![BLOCK / mma::STEP] {
        let a = ds + comptime![mma::advance(a_layout, 0, s * mma::STEP)];
        let b = q_t + comptime![mma::advance(b_layout, 0, s * mma::STEP)];
        mma::mma(acc, a, b, D, a_layout.major, b_layout.major, element);
    }
    mma::commit();
}

/// Starts `acc_dq = dsᵀ · k`: the queries of the block, over all 128 keys; the warpgroup's half of the columns.
#[cube]
pub fn issue_dq(acc: &mut Array<f32>, ds_t: u64, k_t: u64, #[comptime] element: Half) {
    let a_layout = comptime![mma::mn_major(BLOCK, CUBE_KEYS)];
    let b_layout = comptime![mma::mn_major(D, mma::ROWS)];
    mma::fill(acc, 0.0, comptime![D / 4]);
    mma::pin(acc);
    mma::fence();
    #[unroll]
    for s in 0..comptime![CUBE_KEYS / mma::STEP] {
        let a = ds_t + comptime![mma::advance(a_layout, 0, s * mma::STEP)];
        // K is one tile per warpgroup.
        let (tile, key) = comptime![(s * mma::STEP / mma::ROWS, s * mma::STEP % mma::ROWS)];
        let b = k_t + comptime![(tile * K_TILE * 4 / 16) as u64 + mma::advance(b_layout, 0, key)];
        mma::mma(acc, a, b, comptime![D / 2], a_layout.major, b_layout.major, element);
    }
    mma::commit();
}
