//! What the attention kernels share: rings of tiles, masks, and the way of an accumulator to memory.
use crate::hopper::mma::{self, PANEL, Pair, STEP};
use crate::hopper::ring::barrier_at;
use cubecl::prelude::*;
use half::bf16;

/// A score no query sees: finite, so that a block without any visible key does no harm.
pub const HIDDEN: f32 = -1.0e30;

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

/// A ring of `stages` tiles of `rows` × `head_dim`. Its barriers are ready when the cube has met after this.
#[cube]
pub fn ring(#[comptime] stages: usize, #[comptime] rows: usize, #[comptime] head_dim: usize) -> Ring {
    let tiles = Shared::<[Pair]>::new_aligned_slice(comptime![stages * rows * head_dim / 2], 1024usize);
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
    let tile = comptime![rows * head_dim / 2];
    barrier_at(&ring.free, to.stage).wait_parity(to.parity ^ 1);
    let full = barrier_at(&ring.full, to.stage);
    full.arrive_and_expect_tx(1, more + comptime![(4 * tile) as u32]);
    full.tma_load_5d(source, ring.tiles.slice_mut(to.stage * tile, (to.stage + 1) * tile), batch, head, 0, row, 0);
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
pub fn offset(slot: &Slot, #[comptime] rows: usize, #[comptime] head_dim: usize) -> u64 {
    slot.stage as u64 * comptime![(rows * head_dim * 2 / 16) as u64]
}

/// Arrays of registers for the left operand of a product over `block` elements.
#[cube]
pub fn operand(#[comptime] block: usize) -> Sequence<Array<u32>> {
    let mut registers = Sequence::<Array<u32>>::new();
    #[unroll]
    for _ in 0..comptime![block / STEP] {
        registers.push(Array::<u32>::new(4usize));
    }
    registers
}

/// Rounds an accumulator of `block` columns to bf16, as the left operand of another product.
#[cube]
pub fn pack_operand(registers: &mut Sequence<Array<u32>>, from: &Array<f32>, #[comptime] block: usize) {
    #[unroll]
    for s in 0..comptime![block / STEP] {
        #[unroll]
        for i in 0..4usize {
            let at = comptime![s * 8 + i * 2];
            let packed = mma::pack(from[at], from[at + 1]);
            let target = registers.index_mut(s);
            target[i] = packed;
        }
    }
}

/// Keeps accesses to the operand's registers on their side of this point.
#[cube]
pub fn pin_operand(registers: &mut Sequence<Array<u32>>, #[comptime] block: usize) {
    #[unroll]
    for s in 0..comptime![block / STEP] {
        mma::pin(registers.index_mut(s));
    }
}

/// Starts `scores = a bᵀ` as one group: 64 rows of `a`, `block` rows of `b`, both `head_dim` long.
#[cube]
pub fn issue_scores(scores: &mut Array<f32>, a: u64, b: u64, #[comptime] block: usize, #[comptime] head_dim: usize) {
    let a_layout = comptime![mma::k_major(mma::ROWS, head_dim)];
    let b_layout = comptime![mma::k_major(block, head_dim)];
    mma::fill(scores, 0.0, comptime![block / 2]);
    mma::pin(scores);
    mma::fence();
    #[unroll]
    for s in 0..comptime![head_dim / STEP] {
        let a = a + comptime![mma::advance(a_layout, 0, s * STEP)];
        let b = b + comptime![mma::advance(b_layout, 0, s * STEP)];
        mma::mma(scores, a, b, block, a_layout.major, b_layout.major);
    }
    mma::commit();
}

/// Starts `sum += a b` as one group: `a` 64 × `block` in registers, `b` a tile of `block` rows.
#[cube]
pub fn issue_product(
    sum: &mut Array<f32>,
    a: &mut Sequence<Array<u32>>,
    b: u64,
    #[comptime] block: usize,
    #[comptime] head_dim: usize,
) {
    let layout = comptime![mma::mn_major(head_dim, block)];
    mma::pin(sum);
    pin_operand(a, block);
    mma::fence();
    #[unroll]
    for s in 0..comptime![block / STEP] {
        let b = b + comptime![mma::advance(layout, 0, s * STEP)];
        mma::mma_registers(sum, a.index(s), b, head_dim, layout.major);
    }
    mma::commit();
}

/// Hides the keys that rows `row` and `row + 8` do not see; `column` is the key of the unit's first score.
#[cube]
pub fn hide(
    scores: &mut Array<f32>,
    row: u32,
    queries: u32,
    keys: u32,
    column: u32,
    #[comptime] block: usize,
    #[comptime] causal: bool,
) {
    #[unroll]
    for half in 0..2usize {
        let mut seen = keys as i32 - column as i32;
        if comptime![causal] {
            seen = min(seen, (row + keys - queries) as i32 + comptime![(half * 8 + 1) as i32] - column as i32);
        }
        #[unroll]
        for i in 0..comptime![block / 4] {
            let index = comptime![(i / 2) * 4 + half * 2 + i % 2];
            let key = comptime![((i / 2) * 8 + i % 2) as i32];
            scores[index] = select(key < seen, scores[index], HIDDEN);
        }
    }
}

/// Stores 64 rows of `sum`, each times its factor, at `row` of a tensor. `tile` is 64 × `head_dim` of shared memory that
/// no MMA reads any more; each plane uses the 16 rows that its own MMAs read. Rows past the tensor's end are left out.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn store(
    sum: &Array<f32>,
    factor: &Array<f32>,
    tile: &mut [Pair],
    target: &mut TensorMap<bf16, Tiled>,
    batch: i32,
    head: i32,
    row: u32,
    #[comptime] head_dim: usize,
) {
    let layout = comptime![mma::k_major(mma::ROWS, head_dim)];
    let plane = (UNIT_POS / 32) % 4;
    let lane = UNIT_POS % 32;
    #[unroll]
    for i in 0..comptime![head_dim / 4] {
        let half = comptime![i % 2];
        let pair = mma::pack(sum[2 * i] * factor[half], sum[2 * i + 1] * factor[half]);
        let line = (plane * 16 + lane / 4) as usize + comptime![half * 8];
        let along = comptime![(i / 2) * 8] + ((lane % 4) * 2) as usize;
        tile[layout.offset(line, along, 2usize) / 2] = Pair::reinterpret(pair);
    }
    sync_async_proxy_shared();
    sync_plane();
    if lane == 0 {
        #[unroll]
        for p in 0..comptime![head_dim / PANEL] {
            let from = plane as usize * comptime![16 * PANEL / 2] + comptime![p * mma::ROWS * PANEL / 2];
            let rows = tile.slice(from, from + comptime![16 * PANEL / 2]);
            let stored = tma_store_5d(rows, target, batch, head, comptime![p as i32], (row + plane * 16) as i32, 0);
            stored.wait();
        }
    }
}
