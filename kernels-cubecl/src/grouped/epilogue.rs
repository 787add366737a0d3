//! The epilogue: each plane stages its 16 rows in shared memory, 128 bytes of each at a time, and stores them by TMA.
use super::plan::{Epilogue, GroupedPlan};
use super::tiles::{ROWS, Tile};
use crate::hopper::{bulk, mma, tma};
use cubecl::prelude::*;

/// Words of a panel of 16 rows.
const PANEL_WORDS: usize = 16 * 32;

/// Staging memory of all planes.
#[cube]
pub fn staging(#[comptime] plan: GroupedPlan) -> Shared<[u32]> {
    Shared::<[u32]>::new_aligned_slice(comptime![8 * plan.staged * PANEL_WORDS], 1024usize)
}

/// Adds the bias of the tile's group times the factor of each row.
#[cube]
pub fn add_bias(
    sum: &mut Array<f32>,
    bias: &[u32],
    factors: &[f32],
    tile: &Tile,
    features: u32,
    plane: u32,
    #[comptime] plan: GroupedPlan,
) {
    let lane = UNIT_POS % 32;
    let row = tile.row * comptime![ROWS as u32] + plane * 16 + lane / 4;
    let (upper, lower) = (factors[row as usize], factors[(row + 8) as usize]);
    let column = tile.column * comptime![plan.width as u32] + (lane % 4) * 2;
    #[unroll]
    for i in 0..comptime![plan.width / 8] {
        let column = column + comptime![8 * i as u32];
        // The last column of tiles may be past the end.
        if column < features {
            let pair = bias[((tile.first + column) / 2) as usize];
            let (left, right) = mma::unpack(pair, plan.element);
            sum[4 * i] += left * upper;
            sum[4 * i + 1] += right * upper;
            sum[4 * i + 2] += left * lower;
            sum[4 * i + 3] += right * lower;
        }
    }
}

/// Hands a tile to TMA. Previous tiles may still be on their way.
#[cube]
pub fn store<O: Float>(
    sum: &Array<f32>,
    staging: &mut Shared<[u32]>,
    out: &mut TensorMap<O, Tiled>,
    tile: &Tile,
    plane: u32,
    #[comptime] plan: GroupedPlan,
) {
    let lane = UNIT_POS % 32;
    let columns = comptime![plan.result_panel()];
    let own = plane * comptime![(plan.staged * PANEL_WORDS) as u32];
    let row = (tile.row * comptime![ROWS as u32] + plane * 16) as i32;
    let column = (tile.column * comptime![plan.width as u32]) as i32;
    #[unroll]
    for p in 0..comptime![plan.width / columns] {
        let from = comptime![(p % plan.staged) * PANEL_WORDS];
        // TMA has read the previous panel in this memory.
        if lane == 0 {
            bulk::wait_for_older_reads(comptime![plan.staged - 1]);
        }
        sync_plane();
        if comptime![plan.result_bytes() == 2] {
            write_pairs(sum, staging, own, lane, p, plan);
        } else {
            write_words(sum, staging, own, lane, p, plan);
        }
        sync_async_proxy_shared();
        sync_plane();
        if lane == 0 {
            let at = column + comptime![(p * columns) as i32];
            let from = own as usize + from;
            let panel = staging.slice(from, from + PANEL_WORDS);
            if comptime![plan.epilogue == Epilogue::AddFp32] {
                tma::add_tile(panel, out, tile.group as i32, row, at);
            } else {
                tma::store_tile(panel, out, tile.group as i32, row, at);
            }
        }
    }
}

/// Waits until TMA has read everything.
#[cube]
pub fn drain() {
    bulk::wait_for_reads();
}

/// Stages panel `p`, rounded to 16 bits; the plane's panels begin at word `own`. TMA's swizzle avoids bank conflicts
/// between the units.
#[cube]
fn write_pairs(
    sum: &Array<f32>,
    staging: &mut Shared<[u32]>,
    own: u32,
    lane: u32,
    #[comptime] p: usize,
    #[comptime] plan: GroupedPlan,
) {
    let line = lane / 4;
    #[unroll]
    for i in 0..8usize {
        let word = own | (line * 32) | ((comptime![i as u32] ^ line) * 4) | (lane % 4);
        #[unroll]
        for half in 0..2usize {
            let at = comptime![(p * 8 + i) * 4 + half * 2];
            let target = word | comptime![((p % plan.staged) * PANEL_WORDS + half * 8 * 32) as u32];
            staging[target as usize] = mma::pack(sum[at], sum[at + 1], plan.element);
        }
    }
}

/// Stages panel `p` in fp32. Two rows share the banks of eight columns: units of odd rows write their second number
/// first.
#[cube]
fn write_words(
    sum: &Array<f32>,
    staging: &mut Shared<[u32]>,
    own: u32,
    lane: u32,
    #[comptime] p: usize,
    #[comptime] plan: GroupedPlan,
) {
    // Recomputed for each panel: addresses that are held over the MMAs take too many registers.
    let own = bulk::opaque(own);
    let line = lane / 4;
    let odd = line % 2;
    #[unroll]
    for i in 0..comptime![plan.result_panel() / 8] {
        let chunk = (comptime![2 * i as u32] | (lane % 4 / 2)) ^ line;
        let word = own | (line * 32) | (chunk * 4) | (lane % 2 * 2);
        let (first, second) = (word | odd, word | (odd ^ 1));
        #[unroll]
        for half in 0..2usize {
            let at = comptime![(p * (plan.result_panel() / 8) + i) * 4 + half * 2];
            let (low, high) = (u32::reinterpret(sum[at]), u32::reinterpret(sum[at + 1]));
            let panel = comptime![((p % plan.staged) * PANEL_WORDS + half * 8 * 32) as u32];
            staging[(first | panel) as usize] = select(odd == 1, high, low);
            staging[(second | panel) as usize] = select(odd == 1, low, high);
        }
    }
}
