//! Transposes of matrices of bytes by tiles in shared memory.
use super::{Eight, UNITS};
use crate::pointwise::{PointwiseError, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Rows and columns of a tile.
pub const TILE: usize = 128;
/// Blocks of four rows in a tile.
pub const BLOCK_ROWS: u32 = TILE as u32 / 4;
/// Blocks of eight columns in a tile.
pub const BLOCK_COLUMNS: u32 = TILE as u32 / 8;
/// Most elements, for 32-bit positions.
const MOST: usize = u32::MAX as usize / 2;

/// A transposed tile: each word holds four rows of a column.
pub type Words = Shared<[u32]>;

/// Position of word `quad` of a column in its line of 32, without bank conflicts between the blocks of a plane (two
/// quads of 16 groups of columns) or between the words of a line.
#[cube]
fn place(quad: u32, group: u32) -> u32 {
    (quad + group * 2) % comptime![BLOCK_ROWS]
}

/// Writes rows `4 quad..` of column `i` of the group.
#[cube]
pub fn put(words: &mut Words, quad: u32, group: u32, #[comptime] i: u32, word: u32) {
    words[((group * 8 + i) * comptime![BLOCK_ROWS] + place(quad, group)) as usize] = word;
}

/// Writes a tile's columns as lines of the transpose, which begins at word `base`; each plane writes one line of 128
/// bytes at a time.
#[cube]
pub fn write_columns(
    words: &Words,
    columns_out: &mut [u32],
    base: u32,
    first_row: u32,
    first_column: u32,
    rows: u32,
    columns: u32,
) {
    let (lane, plane) = (UNIT_POS % 32, UNIT_POS / 32);
    #[unroll]
    for group in 0..comptime![BLOCK_COLUMNS] {
        let line = plane + comptime![group * 8];
        let (row, column) = (first_row + lane * 4, first_column + line);
        if row < rows && column < columns {
            let word = words[(line * comptime![BLOCK_ROWS] + place(lane, group)) as usize];
            // In words: a matrix may have more bytes than 32 bits can count.
            columns_out[(base + column * (rows / 4) + row / 4) as usize] = word;
        }
    }
}

/// Byte `i` of each of four words.
#[cube]
fn gather(a: u32, b: u32, c: u32, d: u32, #[comptime] i: u32) -> u32 {
    let shift = comptime![8 * i];
    ((a >> shift) & 0xffu32)
        | (((b >> shift) & 0xffu32) << 8)
        | (((c >> shift) & 0xffu32) << 16)
        | (((d >> shift) & 0xffu32) << 24)
}

/// Like [`cast_tiles`](super::cast::cast_tiles), but of bytes.
#[cube(launch_unchecked)]
pub fn transpose_tiles(x: &[Eight], columns_out: &mut [u32], rows: u32, columns: u32) {
    let mut words = Words::new_slice(TILE * TILE / 4);
    let across = (columns + comptime![TILE as u32 - 1]) / comptime![TILE as u32];
    let first_row = CUBE_POS_X / across * comptime![TILE as u32];
    let first_column = CUBE_POS_X % across * comptime![TILE as u32];
    let width = columns / 8;
    #[unroll]
    for turn in 0..2u32 {
        let block = UNIT_POS + comptime![turn * UNITS];
        let (quad, group) = (block / comptime![BLOCK_COLUMNS], block % comptime![BLOCK_COLUMNS]);
        let (row, column) = (first_row + quad * 4, first_column + group * 8);
        if row < rows && column < columns {
            let at = (row * width + column / 8) as usize;
            let line = width as usize;
            let a = x[at];
            let b = x[at + line];
            let c = x[at + 2 * line];
            let d = x[at + 3 * line];
            #[unroll]
            for i in 0..8usize {
                let half = comptime![i / 4];
                let byte = comptime![(i % 4) as u32];
                let word = gather(a.extract(half), b.extract(half), c.extract(half), d.extract(half), byte);
                put(&mut words, quad, group, comptime![i as u32], word);
            }
        }
    }
    sync_cube();
    write_columns(&words, columns_out, 0u32, first_row, first_column, rows, columns);
}

/// # Errors
/// If a side is no multiple of 16, or there are more elements than positions.
pub(super) fn check_matrix(rows: usize, columns: usize) -> Result<(), PointwiseError> {
    check("rows", rows, 16, MOST)?;
    check("columns", columns, 16, 4 * MOST / rows)
}

/// A cube for each tile.
pub(super) fn tiles(rows: usize, columns: usize) -> CubeCount {
    CubeCount::Static((rows.div_ceil(TILE) * columns.div_ceil(TILE)) as u32, 1, 1)
}

/// Writes the transpose `[columns, rows]` of the bytes `x [rows, columns]`, both without gaps.
///
/// # Errors
/// If a side is no multiple of 16, or a buffer is too short.
pub fn transpose(client: &Client, x: &Handle, out: &Handle, rows: usize, columns: usize) -> Result<(), PointwiseError> {
    check_matrix(rows, columns)?;
    let len = rows * columns;
    let (x, out) = (buffer("x", x, len / 8, 8)?, buffer("out", out, len / 4, 4)?);
    let (count, dim) = (tiles(rows, columns), CubeDim::new_1d(UNITS));
    // SAFETY: blocks past the last row or column do nothing.
    unsafe { transpose_tiles::launch_unchecked(client, count, dim, x, out, rows as u32, columns as u32) };
    Ok(())
}
