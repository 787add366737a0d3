//! Rings of tiles that the copy engine fills.
use crate::hopper::mma::{PANEL, Pair};
use crate::hopper::ring::barrier_at;
use cubecl::prelude::*;
use half::bf16;

/// Tiles in shared memory that the copy engine fills in turn and both warpgroups read.
#[derive(CubeType)]
pub struct Ring {
    /// One after the other.
    pub tiles: Shared<[Pair]>,
    /// Barriers: tile is there.
    pub full: Shared<[u64]>,
    /// Barriers: all eight planes have read the tile.
    pub free: Shared<[u64]>,
}

/// A ring of `stages` tiles of `rows` × `width`. Its barriers are ready when the cube has met after this.
#[cube]
pub fn ring(#[comptime] stages: usize, #[comptime] rows: usize, #[comptime] width: usize) -> Ring {
    let tiles = Shared::<[Pair]>::new_aligned_slice(comptime![stages * rows * width / 2], 1024usize);
    let full = Shared::<[u64]>::new_slice(stages);
    let free = Shared::<[u64]>::new_slice(stages);
    if UNIT_POS == 0 {
        #[unroll]
        for s in 0..stages {
            barrier_at(&full, s).init_manual(1);
            barrier_at(&free, s).init_manual(8);
        }
    }
    Ring { tiles, full, free }
}

/// Where tile number `step` of a ring lies and which of its barriers' phases are its.
#[derive(CubeType, Clone, Copy)]
pub struct Slot {
    /// Index in the ring.
    pub stage: usize,
    /// Phase of the `full` barrier that means this tile.
    pub parity: u32,
}

/// The place of tile number `step` in a ring of `stages`.
#[cube]
pub fn slot(step: u32, #[comptime] stages: usize) -> Slot {
    let stages = comptime![stages as u32];
    Slot { stage: (step % stages) as usize, parity: (step / stages) % 2 }
}

/// Has the copy engine bring `rows` rows from `row` on into slot `to`, once the tile there has been read; `more` bytes
/// besides are expected on the same barrier.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn load(
    ring: &mut Ring,
    to: &Slot,
    source: &TensorMap<bf16, Tiled>,
    batch: i32,
    head: i32,
    row: i32,
    more: u32,
    #[comptime] rows: usize,
    #[comptime] head_dim: usize,
) {
    let tile = comptime![rows * head_dim.next_multiple_of(PANEL) / 2];
    barrier_at(&ring.free, to.stage).wait_parity(to.parity ^ 1);
    let full = barrier_at(&ring.full, to.stage);
    full.arrive_and_expect_tx(1, more + comptime![(4 * tile) as u32]);
    let target = ring.tiles.slice_mut(to.stage * tile, (to.stage + 1) * tile);
    fetch(&ring.full, to.stage, target, source, batch, head, row, rows, head_dim);
}

/// Has the copy engine bring `rows` rows to `target`, and tell barrier `index` of `barriers`. Columns that fill the
/// last panel come as zeros.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn fetch(
    barriers: &[u64],
    index: usize,
    target: &mut [Pair],
    source: &TensorMap<bf16, Tiled>,
    batch: i32,
    head: i32,
    row: i32,
    #[comptime] rows: usize,
    #[comptime] head_dim: usize,
) {
    let full = barrier_at(barriers, index);
    if comptime![head_dim % PANEL == 0] {
        full.tma_load_5d(source, target, batch, head, 0, row, 0);
    } else {
        #[unroll]
        for p in 0..comptime![head_dim.div_ceil(PANEL)] {
            let (from, to) = comptime![(p * rows * PANEL / 2, (p + 1) * rows * PANEL / 2)];
            full.tma_load_5d(source, target.slice_mut(from, to), batch, head, 0, row, comptime![(p * PANEL) as i32]);
        }
    }
}

/// Waits until the tile in `slot` is there.
#[cube]
pub fn arrived(ring: &mut Ring, slot: &Slot) {
    barrier_at(&ring.full, slot.stage).wait_parity(slot.parity);
}

/// Says that this plane has read the tile in `slot`.
#[cube]
pub fn release(ring: &mut Ring, slot: &Slot) {
    if UNIT_POS % 32 == 0 {
        barrier_at(&ring.free, slot.stage).arrive();
    }
}

/// What to add to the descriptor of a ring's first tile for the tile in `slot`.
#[cube]
pub fn offset(slot: &Slot, #[comptime] rows: usize, #[comptime] width: usize) -> u64 {
    slot.stage as u64 * comptime![(rows * width * 2 / 16) as u64]
}
