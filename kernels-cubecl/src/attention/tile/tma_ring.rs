//! Rings of tiles that TMA fills.
use crate::hopper::barrier::barrier_at;
use crate::hopper::mma::{PANEL, Pair};
use cubecl::prelude::*;
use half::bf16;

/// A ring of tiles in shared memory, filled by TMA and read by both warpgroups.
#[derive(CubeType)]
pub struct Ring {
    /// The tiles, one after the other.
    pub tiles: Shared<[Pair]>,
    /// Barriers: the tile has arrived.
    pub full: Shared<[u64]>,
    /// Barriers: all eight planes have read the tile.
    pub free: Shared<[u64]>,
}

/// A ring of `stages` tiles of `rows` × `width`. Its barriers are ready after the next barrier of the cube.
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

/// The stage of a ring that a step uses, and the phase of its barriers.
#[derive(CubeType, Clone, Copy)]
pub struct Slot {
    /// Index in the ring.
    pub stage: usize,
    /// Parity of the phase of the `full` barrier that stands for this tile.
    pub parity: u32,
}

/// The stage of step `step` in a ring of `stages`.
#[cube]
pub fn slot(step: u32, #[comptime] stages: usize) -> Slot {
    let stages = comptime![stages as u32];
    Slot { stage: (step % stages) as usize, parity: (step / stages) % 2 }
}

/// Starts the TMA load of `rows` rows from `row` on into stage `to`, after the tile there has been read. The barrier
/// expects `more` bytes of other loads besides.
#[cube]
pub fn load(
    ring: &mut Ring,
    to: &Slot,
    map: &TensorMap<bf16, Tiled>,
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
    fetch(&ring.full, to.stage, target, map, batch, head, row, rows, head_dim);
}

/// Starts the TMA load of `rows` rows into `target`; barrier `index` of `barriers` counts its bytes. TMA fills the last
/// panel with zeros.
#[cube]
pub fn fetch(
    barriers: &[u64],
    index: usize,
    target: &mut [Pair],
    map: &TensorMap<bf16, Tiled>,
    batch: i32,
    head: i32,
    row: i32,
    #[comptime] rows: usize,
    #[comptime] head_dim: usize,
) {
    let full = barrier_at(barriers, index);
    if comptime![head_dim % PANEL == 0] {
        full.tma_load_5d(map, target, batch, head, 0, row, 0);
    } else {
        #[unroll]
        for p in 0..comptime![head_dim.div_ceil(PANEL)] {
            let (from, to) = comptime![(p * rows * PANEL / 2, (p + 1) * rows * PANEL / 2)];
            full.tma_load_5d(map, target.slice_mut(from, to), batch, head, 0, row, comptime![(p * PANEL) as i32]);
        }
    }
}

/// Waits until the tile in `slot` has arrived.
#[cube]
pub fn wait_full(ring: &mut Ring, slot: &Slot) {
    barrier_at(&ring.full, slot.stage).wait_parity(slot.parity);
}

/// Signals that this plane has read the tile in `slot`.
#[cube]
pub fn release(ring: &mut Ring, slot: &Slot) {
    if UNIT_POS % 32 == 0 {
        barrier_at(&ring.free, slot.stage).arrive();
    }
}

/// Offset of the tile in `slot` from the descriptor of the ring's first tile.
#[cube]
pub fn offset(slot: &Slot, #[comptime] rows: usize, #[comptime] width: usize) -> u64 {
    slot.stage as u64 * comptime![(rows * width * 2 / 16) as u64]
}
