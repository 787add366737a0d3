//! Tiles in shared memory, and the registers of `mma.sync.m16n8k16` that are loaded from them.
//!
//! Unit `4 g + t` of a plane holds: of a 16 × 8 accumulator, columns `2 t, 2 t + 1` of rows `g` and `g + 8`; of a left
//! operand (16 × 16), the same rows of columns `2 t ..` and `2 t + 8 ..`; of a right operand (16 × 8), rows `2 t, 2 t +
//! 1` and `2 t + 8, 2 t + 9` of column `g`. So two neighbouring accumulators, once rounded, are a left operand.
use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

/// Two adjacent numbers: a register.
pub type Pair<E> = Vector<E, Const<2>>;
/// Eight adjacent numbers: one access to memory.
pub type Vec8<E> = Vector<E, Const<8>>;
/// Two adjacent numbers of an accumulator.
pub type Acc2 = Vector<f32, Const<2>>;

/// Units of a cube: four planes of 16 rows each.
pub const UNITS: u32 = 128;
/// Rows of a cube's tile.
pub const ROWS: usize = 64;

/// Pairs from one row of a tile to the next: 16 bytes more than a row has, so that the eight rows of a register lie in
/// different banks.
pub fn pitch(length: usize) -> usize {
    length / 2 + 4
}

/// Strides of a tensor, in vectors of the buffer.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Strides {
    pub by_row: u32,
    pub by_batch: u32,
    pub by_head: u32,
}

/// Index of a row's first vector.
#[cube]
pub fn row_offset(strides: &Strides, row: u32, batch: u32, head: u32) -> usize {
    row as usize * strides.by_row as usize
        + batch as usize * strides.by_batch as usize
        + head as usize * strides.by_head as usize
}

/// A tile for `rows` rows of `length` numbers.
#[cube]
pub fn tile<E: Float>(#[comptime] rows: usize, #[comptime] length: usize) -> Shared<[Pair<E>]> {
    Shared::<[Pair<E>]>::new_slice(comptime![rows * pitch(length)])
}

/// The cube fills a tile with the rows from `first` on; zeros from row `end` on.
#[cube]
pub fn fill<E: Float>(
    tile: &mut Shared<[Pair<E>]>,
    source: &[Vec8<E>],
    strides: &Strides,
    batch: u32,
    head: u32,
    first: u32,
    end: u32,
    #[comptime] rows: usize,
    #[comptime] length: usize,
) {
    let width = comptime![(length / 8) as u32];
    let all = comptime![(rows * length / 8) as u32];
    #[unroll]
    for step in 0..comptime![(rows * length / 8).div_ceil(UNITS as usize)] {
        let at = UNIT_POS + comptime![step as u32 * UNITS];
        if at < all {
            let (line, column) = (at / width, at % width);
            let row = first + line;
            let mut numbers = Vec8::<E>::empty();
            #[unroll]
            for i in 0..8usize {
                numbers.insert(i, E::new(0.0));
            }
            if row < end {
                numbers = source[row_offset(strides, row, batch, head) + column as usize];
            }
            let to = (line * comptime![pitch(length) as u32] + column * 4) as usize;
            #[unroll]
            for i in 0..4usize {
                let mut pair = Pair::<E>::empty();
                pair.insert(0usize, numbers.extract(comptime![2 * i]));
                pair.insert(1usize, numbers.extract(comptime![2 * i + 1]));
                tile[to + i] = pair;
            }
        }
    }
}

/// Rows `first..first + 16` and columns `16 step ..` of a tile as a left operand.
#[cube]
pub fn left<E: Float>(
    tile: &Shared<[Pair<E>]>,
    first: u32,
    #[comptime] step: usize,
    #[comptime] length: usize,
) -> Array<Pair<E>> {
    let lane = UNIT_POS % 32;
    let at = ((first + lane / 4) * comptime![pitch(length) as u32] + lane % 4) as usize + comptime![step * 8];
    let below = at + comptime![8 * pitch(length)];
    let mut registers = Array::<Pair<E>>::new(4usize);
    registers[0] = tile[at];
    registers[1] = tile[below];
    registers[2] = tile[at + 4];
    registers[3] = tile[below + 4];
    registers
}

/// The transpose of rows `8 nth ..` and columns `16 step ..` of a tile as a right operand.
#[cube]
pub fn right_of_rows<E: Float>(
    tile: &Shared<[Pair<E>]>,
    #[comptime] nth: usize,
    #[comptime] step: usize,
    #[comptime] length: usize,
) -> Array<Pair<E>> {
    let lane = UNIT_POS % 32;
    let line = lane / 4 * comptime![pitch(length) as u32] + lane % 4;
    let at = line as usize + comptime![8 * nth * pitch(length) + step * 8];
    let mut registers = Array::<Pair<E>>::new(2usize);
    registers[0] = tile[at];
    registers[1] = tile[at + 4];
    registers
}

/// Rows `16 step ..` and columns `8 nth ..` of a tile as a right operand.
#[cube]
pub fn right_of_columns<E: Float>(
    tile: &Shared<[Pair<E>]>,
    #[comptime] nth: usize,
    #[comptime] step: usize,
    #[comptime] length: usize,
) -> Array<Pair<E>> {
    let lane = UNIT_POS % 32;
    let column = lane / 4;
    let line = lane % 4 * 2 * comptime![pitch(length) as u32] + column / 2;
    let odd = column % 2 == 1;
    let mut registers = Array::<Pair<E>>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        let at = line as usize + comptime![(16 * step + 8 * half) * pitch(length) + 4 * nth];
        let (upper, lower) = (tile[at], tile[at + comptime![pitch(length)]]);
        let mut pair = Pair::<E>::empty();
        pair.insert(0usize, select(odd, upper.extract(1usize), upper.extract(0usize)));
        pair.insert(1usize, select(odd, lower.extract(1usize), lower.extract(0usize)));
        registers[half] = pair;
    }
    registers
}

/// Accumulators of 16 rows and `columns` columns, zero.
#[cube]
pub fn accumulators(#[comptime] columns: usize) -> Sequence<Array<Acc2>> {
    let mut all = Sequence::<Array<Acc2>>::new();
    #[unroll]
    for _ in 0..comptime![columns / 8] {
        let mut acc = Array::<Acc2>::new(2usize);
        acc[0] = zeros();
        acc[1] = zeros();
        all.push(acc);
    }
    all
}

#[cube]
fn zeros() -> Acc2 {
    let mut acc = Acc2::empty();
    acc.insert(0usize, 0.0f32);
    acc.insert(1usize, 0.0f32);
    acc
}

/// `acc += a b` for one accumulator.
#[cube]
pub fn multiply<E: Float>(acc: &mut Array<Acc2>, a: &Array<Pair<E>>, b: &Array<Pair<E>>) {
    let mma = MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    let mut before = Array::<Acc2>::new(2usize);
    before[0] = acc[0];
    before[1] = acc[1];
    let next = mma.execute(a, b, &before);
    acc[0] = next[0];
    acc[1] = next[1];
}

/// `own · rowsᵀ`: 16 rows of the tile `own` from `first` on with all `block` rows of the tile `rows`, both `length`
/// long.
#[cube]
pub fn gemm_rows<E: Float>(
    own: &Shared<[Pair<E>]>,
    first: u32,
    rows: &Shared<[Pair<E>]>,
    #[comptime] block: usize,
    #[comptime] length: usize,
) -> Sequence<Array<Acc2>> {
    let mut acc = accumulators(block);
    #[unroll]
    for step in 0..comptime![length / 16] {
        let a = left(own, first, step, length);
        #[unroll]
        for nth in 0..comptime![block / 8] {
            multiply(acc.index_mut(nth), &a, &right_of_rows(rows, nth, step, length));
        }
    }
    acc
}

/// `acc += p · rows`: `p` are accumulators of 16 rows and `block` columns, rounded here; `rows` is a tile of `block`
/// rows.
#[cube]
pub fn gemm_accumulate<E: Float>(
    acc: &mut Sequence<Array<Acc2>>,
    p: &Sequence<Array<Acc2>>,
    rows: &Shared<[Pair<E>]>,
    #[comptime] block: usize,
    #[comptime] length: usize,
) {
    #[unroll]
    for step in 0..comptime![block / 16] {
        let mut a = Array::<Pair<E>>::new(4usize);
        #[unroll]
        for i in 0..4usize {
            a[i] = Pair::<E>::cast_from(p.index(comptime![2 * step + i / 2])[comptime![i % 2]]);
        }
        #[unroll]
        for nth in 0..comptime![length / 8] {
            multiply(acc.index_mut(nth), &a, &right_of_columns(rows, nth, step, length));
        }
    }
}

/// Writes 16 rows of accumulators, each times its factor, at `row` and `row + 8` of a head, if they are before `end`.
#[cube]
pub fn store<E: Float>(
    target: &mut [Pair<E>],
    strides: &Strides,
    acc: &Sequence<Array<Acc2>>,
    factors: &Array<f32>,
    row: u32,
    end: u32,
    batch: u32,
    head: u32,
    #[comptime] length: usize,
) {
    #[unroll]
    for half in 0..2usize {
        let row = row + comptime![8 * half as u32];
        if row < end {
            let at = row_offset(strides, row, batch, head) + (UNIT_POS % 4) as usize;
            let factor = factors[half];
            #[unroll]
            for nth in 0..comptime![length / 8] {
                let acc = acc.index(nth)[half];
                let mut scaled = Acc2::empty();
                scaled.insert(0usize, acc.extract(0usize) * factor);
                scaled.insert(1usize, acc.extract(1usize) * factor);
                target[at + comptime![4 * nth]] = Pair::<E>::cast_from(scaled);
            }
        }
    }
}
