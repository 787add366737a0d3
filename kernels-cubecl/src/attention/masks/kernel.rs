//! How attention kernels read bits. A unit has two rows of a tile, eight apart, and of each group of 16 columns the
//! columns `c, c + 1, c + 8, c + 9` for its own `c`: one shifted word has all four of a row.
use cubecl::prelude::*;

/// Where the rows of a mask are.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct BitRows {
    /// Words from a batch to the next.
    pub by_batch: u32,
    /// Words from a head to the next.
    pub by_head: u32,
    /// Words from a row to the next.
    pub by_row: u32,
    /// The last row.
    pub last_row: u32,
    /// The last word of a row.
    pub last_word: u32,
}

/// A unit's two rows of a mask.
#[derive(CubeType, Clone, Copy)]
pub struct RowMasks {
    /// First word of row `row`.
    pub first: u32,
    /// First word of row `row + 8`.
    pub second: u32,
    /// The last word of a row.
    pub last_word: u32,
}

/// Rows `row` and `row + 8` of a head. Rows past the last one are that.
#[cube]
pub fn row_masks(rows: &BitRows, batch: u32, head: u32, row: u32) -> RowMasks {
    let at = batch * rows.by_batch + head * rows.by_head;
    RowMasks {
        first: at + u32::min(row, rows.last_row) * rows.by_row,
        second: at + u32::min(row + 8, rows.last_row) * rows.by_row,
        last_word: rows.last_word,
    }
}

/// The bits of the columns from `column` on, within a group of 16.
#[cube]
fn bits(words: &[u32], row: u32, column: u32, last_word: u32) -> u32 {
    words[(row + u32::min(column / 32, last_word)) as usize] >> (column % 32)
}

/// The bit of score `index` of a unit in the words of its group.
fn place(index: usize) -> u32 {
    (8 * ((index / 4) % 2) + index % 2) as u32
}

/// Gives the values whose bit is `set` another value; `column` is the column of the unit's first value.
#[cube]
pub fn replace(
    values: &mut Array<f32>,
    words: &[u32],
    rows: &RowMasks,
    column: u32,
    value: f32,
    #[comptime] set: bool,
    #[comptime] block: usize,
) {
    #[unroll]
    for group in 0..comptime![block / 16] {
        let at = column + comptime![(16 * group) as u32];
        let first = bits(words, rows.first, at, rows.last_word);
        let second = bits(words, rows.second, at, rows.last_word);
        #[unroll]
        for i in 0..8usize {
            let index = comptime![8 * group + i];
            let word = if comptime![(index / 2) % 2 == 0] { first } else { second };
            let is_set = word & comptime![1u32 << place(index)] != 0;
            if comptime![set] {
                values[index] = select(is_set, value, values[index]);
            } else {
                values[index] = select(is_set, values[index], value);
            }
        }
    }
}
