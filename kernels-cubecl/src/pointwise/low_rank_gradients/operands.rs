//! Where the planes of a cube have their tiles and the operands of the short matrices.
use super::Plan;
use crate::attention::portable::mma::tile::Pair;
use crate::hopper::barrier::barrier_at;
use crate::pointwise::Vec8;
use cubecl::prelude::*;

/// Rows of a tile.
pub const ROWS: usize = 16;
/// Columns of a panel of a tile: a line of 128 bytes.
pub const PANEL: usize = 64;
/// Vectors of a line.
pub const LINE: u32 = 8;
/// Pairs from a column of a tile of `x` to the next: eight, and four so that eight columns lie in different banks.
pub const PITCH: usize = 12;

/// Vectors of a tile of a plane.
pub fn tile_len(plan: Plan) -> usize {
    ROWS * plan.panels() * LINE as usize
}

/// The tiles of a cube's planes.
#[derive(CubeType)]
pub struct Ring<E: Float> {
    pub tiles: Shared<[Vec8<E>]>,
    pub full: Shared<[u64]>,
}

/// Lets TMA fill the stage of tile `nth` of a plane with the rows of tile `tile`.
#[cube]
pub fn load<E: Float>(
    ring: &mut Ring<E>,
    dy: &TensorMap<E, Tiled>,
    plane: u32,
    nth: u32,
    tile: u32,
    first: u32,
    #[comptime] plan: Plan,
) {
    let slot = (plane * comptime![plan.stages as u32] + nth % comptime![plan.stages as u32]) as usize;
    let full = barrier_at(&ring.full, slot);
    full.arrive_and_expect_tx(1, comptime![(16 * tile_len(plan)) as u32]);
    let row = (tile * comptime![ROWS as u32]) as i32;
    #[unroll]
    for p in 0..comptime![plan.panels()] {
        let from = slot * comptime![tile_len(plan)] + comptime![p * ROWS * LINE as usize];
        let target = ring.tiles.slice_mut(from, from + comptime![ROWS * LINE as usize]);
        full.tma_load_2d(dy, target, row, first as i32 + comptime![(p * PANEL) as i32]);
    }
}

/// The right operands of `dy · w` for a plane's columns. Of the order of the terms of a sum, in which `dy` has the same:
/// unit `4 g + t` reads in panel `p`, half `s` and step `h` the columns `8 (2 t + s) + 4 h ..`.
#[cube]
pub fn weights<E: Float>(w: &[E], first: u32, #[comptime] plan: Plan) -> Sequence<Array<Pair<E>>> {
    let (group, t) = (UNIT_POS % 32 / 4, UNIT_POS % 4);
    let inner = comptime![16 * plan.steps as u32];
    let mut all = Sequence::<Array<Pair<E>>>::new();
    #[unroll]
    for i in 0..comptime![plan.panels() * 4] {
        let at = comptime![(i / 4 * PANEL + i / 2 % 2 * 8 + i % 2 * 4) as u32];
        let column = first + at + 16 * t;
        #[unroll]
        for nth in 0..comptime![2 * plan.steps] {
            let mut registers = Array::<Pair<E>>::new(2usize);
            #[unroll]
            for part in 0..2usize {
                let from = (column + comptime![2 * part as u32]) * inner + comptime![8 * nth as u32] + group;
                registers[part] = pair(w[from as usize], w[(from + inner) as usize]);
            }
            all.push(registers);
        }
    }
    all
}

/// Reads the unit's pairs of a tile of `x`: rows `2 p` and `2 p + 1` of a column.
#[cube]
pub fn read_x<E: Float>(x: &[E], tile: u32, block: u32, #[comptime] plan: Plan) -> Array<Pair<E>> {
    let (inner, units) = comptime![(16 * plan.steps as u32, 32 * plan.planes as u32)];
    let pitch = comptime![(plan.blocks * 16 * plan.steps) as u32];
    let turns = comptime![(8 * inner).div_ceil(units)];
    let mut pairs = Array::<Pair<E>>::new(comptime![turns as usize]);
    #[unroll]
    for turn in 0..turns {
        let item = UNIT_POS + comptime![turn * units];
        // Units past the last item read it again.
        let (two, column) = (min(item / inner, 7u32), item % inner);
        let from = (tile * comptime![ROWS as u32] + 2 * two) * pitch + block * inner + column;
        pairs[turn as usize] = pair(x[from as usize], x[(from + pitch) as usize]);
    }
    pairs
}

/// Writes them to shared memory, by columns.
#[cube]
pub fn store_x<E: Float>(pairs: &Array<Pair<E>>, short: &mut Shared<[Pair<E>]>, first: u32, #[comptime] plan: Plan) {
    let (inner, units) = comptime![(16 * plan.steps as u32, 32 * plan.planes as u32)];
    #[unroll]
    for turn in 0..comptime![(8 * inner).div_ceil(units)] {
        let item = UNIT_POS + comptime![turn * units];
        if item < comptime![8 * inner] {
            short[(first + item % inner * comptime![PITCH as u32] + item / inner) as usize] = pairs[turn as usize];
        }
    }
}

/// Rows `g` and `g + 8` of eight columns, the numbers `4 h ..` of them, as a left operand.
#[cube]
pub fn left_of<E: Float>(upper: Vec8<E>, lower: Vec8<E>, #[comptime] h: usize) -> Array<Pair<E>> {
    let mut left = Array::<Pair<E>>::new(4usize);
    #[unroll]
    for part in 0..2usize {
        let at = comptime![4 * h + 2 * part];
        left[comptime![2 * part]] = pair(upper.extract(at), upper.extract(comptime![at + 1]));
        left[comptime![2 * part + 1]] = pair(lower.extract(at), lower.extract(comptime![at + 1]));
    }
    left
}

/// The transpose of columns `2 j` and `2 j + 1` of rows `2 t`, `2 t + 1`, `2 t + 8` and `2 t + 9`, as a left operand.
#[cube]
pub fn left_turned<E: Float>(rows: &Array<Vec8<E>>, #[comptime] j: usize) -> Array<Pair<E>> {
    let mut left = Array::<Pair<E>>::new(4usize);
    #[unroll]
    for i in 0..2usize {
        let column = comptime![2 * j + i];
        left[i] = pair(rows[0].extract(column), rows[1].extract(column));
        left[comptime![2 + i]] = pair(rows[2].extract(column), rows[3].extract(column));
    }
    left
}

#[cube]
fn pair<E: Float>(low: E, high: E) -> Pair<E> {
    let mut pair = Pair::<E>::empty();
    pair.insert(0usize, low);
    pair.insert(1usize, high);
    pair
}
