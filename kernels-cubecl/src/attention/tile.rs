//! What the attention kernels share: rings of tiles, masks, and the way of an accumulator to memory.
use super::draw;
use super::variant::{Part, Variant};
use crate::hopper::mma::{self, Half, PANEL, Pair, STEP};
use crate::hopper::ring::barrier_at;
use crate::tiling::Sight;
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

/// Has the copy engine bring `rows` rows to `target`, and tell barrier `index` of `barriers`. Columns that fill the last
/// panel come as zeros.
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

/// Rounds an accumulator of `block` columns to 16 bits, as the left operand of another product. With `dropped`, negative
/// numbers stand for ones that were dropped.
#[cube]
pub fn pack_operand(
    registers: &mut Sequence<Array<u32>>,
    from: &Array<f32>,
    #[comptime] block: usize,
    #[comptime] dropped: bool,
    #[comptime] element: Half,
) {
    #[unroll]
    for s in 0..comptime![block / STEP] {
        #[unroll]
        for i in 0..4usize {
            let at = comptime![s * 8 + i * 2];
            let mut low = from[at];
            let mut high = from[at + 1];
            if comptime![dropped] {
                low = max(low, 0.0);
                high = max(high, 0.0);
            }
            let packed = mma::pack(low, high, element);
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
pub fn issue_scores(
    scores: &mut Array<f32>,
    a: u64,
    b: u64,
    #[comptime] block: usize,
    #[comptime] head_dim: usize,
    #[comptime] element: Half,
) {
    let width = comptime![head_dim.next_multiple_of(PANEL)];
    let a_layout = comptime![mma::k_major(mma::ROWS, width)];
    let b_layout = comptime![mma::k_major(block, width)];
    mma::fill(scores, 0.0, comptime![block / 2]);
    mma::pin(scores);
    mma::fence();
    #[unroll]
    for s in 0..comptime![head_dim / STEP] {
        let a = a + comptime![mma::advance(a_layout, 0, s * STEP)];
        let b = b + comptime![mma::advance(b_layout, 0, s * STEP)];
        mma::mma(scores, a, b, block, a_layout.major, b_layout.major, element);
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
    #[comptime] element: Half,
) {
    let layout = comptime![mma::mn_major(head_dim.next_multiple_of(PANEL), block)];
    mma::pin(sum);
    pin_operand(a, block);
    mma::fence();
    #[unroll]
    for s in 0..comptime![block / STEP] {
        let b = b + comptime![mma::advance(layout, 0, s * STEP)];
        mma::mma_registers(sum, a.index(s), b, head_dim, layout.major, element);
    }
    mma::commit();
}

/// Hides the keys that rows `row` and `row + 8` do not see; `column` is the key of the unit's first score.
#[cube]
pub fn hide(
    scores: &mut Array<f32>,
    row: u32,
    column: u32,
    sight: &Sight,
    #[comptime] block: usize,
    #[comptime] variant: Variant,
) {
    #[unroll]
    for half in 0..2usize {
        let place = row as i32 + sight.offset + comptime![(half * 8) as i32] - column as i32;
        let mut end = sight.keys as i32 - column as i32;
        if comptime![variant.causal] {
            end = min(end, place + 1);
        } else if comptime![variant.window] {
            end = min(end, place + sight.window);
        }
        let begin = place + 1 - sight.window;
        #[unroll]
        for i in 0..comptime![block / 4] {
            let index = comptime![(i / 2) * 4 + half * 2 + i % 2];
            let key = comptime![((i / 2) * 8 + i % 2) as i32];
            scores[index] = select(key < end, scores[index], HIDDEN);
            if comptime![variant.window] {
                scores[index] = select(key >= begin, scores[index], HIDDEN);
            }
        }
    }
}

/// The two keys of dropout for each of a unit's two rows.
#[derive(CubeType)]
pub struct Draws {
    /// First keys of rows `row` and `row + 8`.
    pub first: Array<u32>,
    /// Second keys.
    pub second: Array<u32>,
}

/// The dropout keys of rows `row` and `row + 8`, which begin at `at` in `keys`; rows past the last have those of the last.
#[cube]
pub fn draws(keys: &[u32], at: u32, row: u32, queries: u32, statistics: u32, #[comptime] dropout: bool) -> Draws {
    let mut first = Array::<u32>::new(2usize);
    let mut second = Array::<u32>::new(2usize);
    if comptime![dropout] {
        #[unroll]
        for half in 0..2usize {
            let index = at + u32::min(row + comptime![(half * 8) as u32], queries - 1);
            first[half] = keys[index as usize];
            second[half] = keys[(index + statistics) as usize];
        }
    }
    Draws { first, second }
}

/// Whether score `index` of a unit survives dropout; `place` is the spread number of the unit's first column.
#[cube]
pub fn survives(draws: &Draws, place: u32, limit: u32, #[comptime] index: usize) -> bool {
    let half = comptime![(index / 2) % 2];
    let column = comptime![draw::spread_by((index / 4) * 8 + index % 2)];
    draw::draw(place + column, draws.first[half], draws.second[half]) >= limit
}

/// Stores 64 rows of `sum`, each times its factor, at `row` of a sequence that begins at `first` in the tensor. `tile` is
/// 64 rows of shared memory that no MMA of this plane reads any more; each plane uses the 16 rows that its own MMAs read.
/// Rows past the tensor's end are left out; when sequences are packed, those from `rows` on: the next sequence's.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn store(
    sum: &Array<f32>,
    factor: &Array<f32>,
    tile: &mut [Pair],
    target: &mut TensorMap<bf16, Tiled>,
    part: &Part,
    head: i32,
    first: u32,
    row: u32,
    rows: u32,
    #[comptime] head_dim: usize,
    #[comptime] variant: Variant,
) {
    let width = comptime![head_dim.next_multiple_of(PANEL)];
    let layout = comptime![mma::k_major(mma::ROWS, width)];
    let plane = (UNIT_POS / 32) % 4;
    let lane = UNIT_POS % 32;
    if comptime![variant.packed] {
        // Rows without panels lie across what the MMAs of other planes read.
        sync_cube();
    }
    #[unroll]
    for i in 0..comptime![head_dim / 4] {
        let half = comptime![i % 2];
        let pair = mma::pack(sum[2 * i] * factor[half], sum[2 * i + 1] * factor[half], variant.element);
        let line = (plane * 16 + lane / 4) as usize + comptime![half * 8];
        let along = comptime![(i / 2) * 8] + ((lane % 4) * 2) as usize;
        if comptime![variant.packed] {
            tile[(line * width + along) / 2] = Pair::reinterpret(pair);
        } else {
            tile[layout.offset(line, along, 2usize) / 2] = Pair::reinterpret(pair);
        }
    }
    sync_async_proxy_shared();
    sync_plane();
    if comptime![variant.packed] {
        // A box of several rows could reach into the next sequence.
        let line = plane * 16 + lane;
        if lane < 16 && row + line < rows {
            let from = line as usize * comptime![width / 2];
            let stored = tma_store_5d(
                tile.slice(from, from + comptime![head_dim / 2]),
                target,
                part.batch,
                head,
                0,
                (first + row + line) as i32,
                0,
            );
            stored.wait();
        }
        sync_plane();
    } else if lane == 0 {
        #[unroll]
        for p in 0..comptime![width / PANEL] {
            let from = plane as usize * comptime![16 * PANEL / 2] + comptime![p * mma::ROWS * PANEL / 2];
            let rows = tile.slice(from, from + comptime![16 * PANEL / 2]);
            let at = (row + plane * 16) as i32;
            // A head of whole panels has a dimension of panels; another one is a single row of columns.
            let whole = comptime![head_dim % PANEL == 0];
            let panel = comptime![if whole { p as i32 } else { 0 }];
            let column = comptime![if whole { 0 } else { (p * PANEL) as i32 }];
            let stored = tma_store_5d(rows, target, part.batch, head, panel, at, column);
            stored.wait();
        }
    }
}
