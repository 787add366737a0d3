//! Casts to FP8 with a scale on the device: row-major, and in the same pass the transpose.
use super::transpose::{BLOCK_COLUMNS, BLOCK_ROWS, TILE, Words, check_matrix, put, tiles, write_columns};
use super::{Codec, Eight, Format, UNITS, Vec8, pack};
use crate::pointwise::{CubeShape, PointwiseError, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Sixteen eight-bit numbers: the output of a unit of the plain cast.
pub type Sixteen = Vector<u32, Const<4>>;
/// Words per line of tiles of groups: its first row, and the group's first row, rows and index.
pub(super) const WORDS: usize = 4;

/// Four of eight numbers, scaled and cast.
#[cube]
pub(crate) fn quarter<E: Float>(
    x: Vec8<E>,
    scale: f32,
    #[comptime] first: usize,
    #[comptime] format: Format,
    #[comptime] codec: Codec,
) -> u32 {
    pack(
        f32::cast_from(x.extract(first)) * scale,
        f32::cast_from(x.extract(comptime![first + 1])) * scale,
        f32::cast_from(x.extract(comptime![first + 2])) * scale,
        f32::cast_from(x.extract(comptime![first + 3])) * scale,
        format,
        codec,
    )
}

/// Sixteen numbers a unit.
#[cube(launch_unchecked)]
pub fn cast_flat<E: Float>(
    x: &[Vec8<E>],
    scale: &[f32],
    out: &mut [Sixteen],
    vectors: u32,
    #[comptime] format: Format,
    #[comptime] codec: Codec,
) {
    let unit = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if unit < vectors {
        let at = unit as usize;
        let factor = scale[0];
        let a = x[at * 2];
        let b = x[at * 2 + 1];
        let mut words = Sixteen::empty();
        words.insert(0usize, quarter::<E>(a, factor, 0usize, format, codec));
        words.insert(1usize, quarter::<E>(a, factor, 4usize, format, codec));
        words.insert(2usize, quarter::<E>(b, factor, 0usize, format, codec));
        words.insert(3usize, quarter::<E>(b, factor, 4usize, format, codec));
        out[at] = words;
    }
}

/// Casts the tile of `TILE` rows and columns that begins at `first_row` and `first_column`, except rows from `end_row`
/// on: row-major, and into `words` for its transpose. A unit casts two blocks of four rows and eight columns.
#[cube]
fn cast_tile<E: Float>(
    x: &[Vec8<E>],
    factor: f32,
    rows_out: &mut [Eight],
    words: &mut Words,
    first_row: u32,
    end_row: u32,
    first_column: u32,
    columns: u32,
    #[comptime] with_rows: bool,
    #[comptime] with_columns: bool,
    #[comptime] format: Format,
    #[comptime] codec: Codec,
) {
    let width = columns / 8;
    #[unroll]
    for turn in 0..2u32 {
        let block = UNIT_POS + comptime![turn * UNITS];
        let (quad, group) = (block / comptime![BLOCK_COLUMNS], block % comptime![BLOCK_COLUMNS]);
        let (row, column) = (first_row + quad * 4, first_column + group * 8);
        if row < end_row && column < columns {
            let at = (row * width + column / 8) as usize;
            let line = width as usize;
            let a = x[at];
            let b = x[at + line];
            let c = x[at + 2 * line];
            let d = x[at + 3 * line];
            if comptime![with_rows] {
                rows_out[at] = eight::<E>(a, factor, format, codec);
                rows_out[at + line] = eight::<E>(b, factor, format, codec);
                rows_out[at + 2 * line] = eight::<E>(c, factor, format, codec);
                rows_out[at + 3 * line] = eight::<E>(d, factor, format, codec);
            }
            if comptime![with_columns] {
                #[unroll]
                for i in 0..8usize {
                    let word = pack(
                        f32::cast_from(a.extract(i)) * factor,
                        f32::cast_from(b.extract(i)) * factor,
                        f32::cast_from(c.extract(i)) * factor,
                        f32::cast_from(d.extract(i)) * factor,
                        format,
                        codec,
                    );
                    put(words, quad, group, comptime![i as u32], word);
                }
            }
        }
    }
}

/// A cube for each tile of the matrix. If `grouped`, of its groups of rows, each with its own scale; `table` then has
/// [`WORDS`] words for each line of tiles.
#[cube(launch_unchecked)]
pub fn cast_tiles<E: Float>(
    x: &[Vec8<E>],
    scale: &[f32],
    table: &[u32],
    rows_out: &mut [Eight],
    columns_out: &mut [u32],
    all_rows: u32,
    columns: u32,
    #[comptime] with_rows: bool,
    #[comptime] with_columns: bool,
    #[comptime] grouped: bool,
    #[comptime] format: Format,
    #[comptime] codec: Codec,
) {
    let mut words = Words::new_slice(TILE * TILE / 4);
    let across = (columns + comptime![TILE as u32 - 1]) / comptime![TILE as u32];
    let line = CUBE_POS_X / across;
    let first_column = CUBE_POS_X % across * comptime![TILE as u32];
    let mut first_row = line * comptime![TILE as u32];
    let mut start = 0u32;
    let mut rows = all_rows;
    let mut group = 0u32;
    if comptime![grouped] {
        let entry = (line * comptime![WORDS as u32]) as usize;
        first_row = table[entry];
        start = table[entry + 1];
        rows = table[entry + 2];
        group = table[entry + 3];
    }
    cast_tile::<E>(
        x,
        scale[group as usize],
        rows_out,
        &mut words,
        first_row,
        start + rows,
        first_column,
        columns,
        with_rows,
        with_columns,
        format,
        codec,
    );
    if comptime![with_columns] {
        sync_cube();
        // In words: rows of groups are multiples of 16.
        let base = start / 4 * columns;
        write_columns(&words, columns_out, base, first_row - start, first_column, rows, columns);
    }
}

#[cube]
pub(super) fn eight<E: Float>(x: Vec8<E>, factor: f32, #[comptime] format: Format, #[comptime] codec: Codec) -> Eight {
    let mut words = Eight::empty();
    words.insert(0usize, quarter::<E>(x, factor, 0usize, format, codec));
    words.insert(1usize, quarter::<E>(x, factor, 4usize, format, codec));
    words
}

/// Format, method and sizes of a cast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conversion {
    /// The format.
    pub format: Format,
    /// The method.
    pub codec: Codec,
    /// Rows of the matrix, a multiple of 16 for a transpose.
    pub rows: usize,
    /// Columns of the matrix, a multiple of 16.
    pub columns: usize,
}

/// Casts `x [rows, columns]` of type `E` (2 bytes) without gaps, times `scale [1]` (fp32), to `by_rows [rows,
/// columns]`, `by_columns [columns, rows]` or both, one byte per number.
///
/// # Errors
/// If there is no kernel for the sizes, or a buffer is too short.
pub fn cast<E: Float>(
    client: &Client,
    x: &Handle,
    scale: &Handle,
    by_rows: Option<&Handle>,
    by_columns: Option<&Handle>,
    conversion: Conversion,
) -> Result<(), PointwiseError> {
    let Conversion { format, codec, rows, columns } = conversion;
    let len = rows * columns;
    match by_columns {
        Some(_) => check_matrix(rows, columns)?,
        None => check("elements", len, 16, 16 * (u32::MAX as usize - UNITS as usize))?,
    }
    let (x, scale) = (buffer("x", x, len / 8, 16)?, buffer("scale", scale, 1, 4)?);
    let cube = CubeShape::of(client);
    let Some(by_columns) = by_columns else {
        let Some(by_rows) = by_rows else { return Ok(()) };
        let out = buffer("by_rows", by_rows, len / 16, 16)?;
        let (count, dim, vectors) = (cube.line(len / 16), cube.dim(), (len / 16) as u32);
        // SAFETY: units past the last vector do nothing; the buffers hold all vectors.
        unsafe { cast_flat::launch_unchecked::<E>(client, count, dim, x, scale, out, vectors, format, codec) };
        return Ok(());
    };
    let unused = client.empty(8);
    let (target, lines) = by_rows.map_or((&unused, 1), |by_rows| (by_rows, len / 8));
    let (target, columns_out) = (buffer("by_rows", target, lines, 8)?, buffer("by_columns", by_columns, len / 4, 4)?);
    let table = buffer("table", &unused, 2, 4)?;
    // SAFETY: blocks past the last row or column do nothing, and `rows_out` is written only if it is whole.
    unsafe {
        launch_kernel!(cast_tiles<E>, client, tiles(rows, columns), CubeDim::new_1d(UNITS);
            x, scale, table, target, columns_out; rows as u32, columns as u32;
            by_rows.is_some(), true, false, format, codec)
    };
    Ok(())
}

/// A block has four rows: one word of the transpose.
const _: () = assert!(BLOCK_ROWS * 4 == TILE as u32 && BLOCK_COLUMNS * 8 == TILE as u32);
