//! The gradients of the scores, which both warpgroups write to shared memory, and the products that read them there.
use super::plan::{BLOCK, D, KEY_TILE, PLACES, SLOPE_TILE};
use super::step::Shares;
use crate::hopper::bulk;
use crate::hopper::mma::{self, Half, Pair};
use crate::hopper::ring::barrier_at;
use crate::tiling::KEY_ROWS;
use cubecl::prelude::*;

/// Waits until both warpgroups have written the gradients of the scores of step `step`.
#[cube]
pub fn wait_for_slopes(shared: &mut Shares, step: u32) {
    let places = comptime![PLACES as u32];
    barrier_at(&shared.there, (step % places) as usize).wait_parity((step / places) % 2);
}

/// What to add to the descriptors of the first place for that of step `step`.
#[cube]
pub fn place_of(step: u32) -> u64 {
    (step % comptime![PLACES as u32]) as u64 * comptime![(2 * SLOPE_TILE * 4 / 16) as u64]
}

/// Writes the warpgroup's 64 keys of `slopes` in 16 bits to `tile`, a line a key.
#[cube]
pub fn share(slopes: &Array<f32>, tile: &mut [Pair], #[comptime] element: Half) {
    let layout = comptime![mma::k_major(mma::ROWS, BLOCK)];
    let unit = bulk::here(UNIT_POS % 128);
    let lane = unit % 32;
    let first = (unit / 32) * 16 + lane / 4;
    #[unroll]
    for i in 0..comptime![BLOCK / 4] {
        let pair = mma::pack(slopes[2 * i], slopes[2 * i + 1], element);
        let line = first as usize + comptime![8 * (i % 2)];
        let along = comptime![(i / 2) * 8] + ((lane % 4) * 2) as usize;
        tile[layout.offset(line, along, 2usize) / 2] = Pair::reinterpret(pair);
    }
}

/// Starts `sum += slopes · q`: the warpgroup's 64 keys over the step's queries.
#[cube]
pub fn issue_key_gradient(sum: &mut Array<f32>, slopes: u64, q_columns: u64, #[comptime] element: Half) {
    let a_layout = comptime![mma::k_major(mma::ROWS, BLOCK)];
    let b_layout = comptime![mma::mn_major(D, BLOCK)];
    mma::pin(sum);
    mma::fence();
    #[unroll]
    for s in 0..comptime![BLOCK / mma::STEP] {
        let a = slopes + comptime![mma::advance(a_layout, 0, s * mma::STEP)];
        let b = q_columns + comptime![mma::advance(b_layout, 0, s * mma::STEP)];
        mma::mma(sum, a, b, D, a_layout.major, b_layout.major, element);
    }
    mma::commit();
}

/// Starts `sum = slopesᵀ · k`: the step's queries over all 128 keys, the warpgroup's half of the columns.
#[cube]
pub fn issue_query_gradient(sum: &mut Array<f32>, slope_columns: u64, k_columns: u64, #[comptime] element: Half) {
    let a_layout = comptime![mma::mn_major(BLOCK, KEY_ROWS)];
    let b_layout = comptime![mma::mn_major(D, mma::ROWS)];
    mma::fill(sum, 0.0, comptime![D / 4]);
    mma::pin(sum);
    mma::fence();
    #[unroll]
    for s in 0..comptime![KEY_ROWS / mma::STEP] {
        let a = slope_columns + comptime![mma::advance(a_layout, 0, s * mma::STEP)];
        // The keys of each warpgroup are a tile of their own.
        let (tile, key) = comptime![(s * mma::STEP / mma::ROWS, s * mma::STEP % mma::ROWS)];
        let b = k_columns + comptime![(tile * KEY_TILE * 4 / 16) as u64 + mma::advance(b_layout, 0, key)];
        mma::mma(sum, a, b, comptime![D / 2], a_layout.major, b_layout.major, element);
    }
    mma::commit();
}
