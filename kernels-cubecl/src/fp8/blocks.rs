//! Casts to FP8 with a scale for each block: 128 consecutive numbers of a row, or 128 rows and columns (Transformer Engine's
//! `Float8BlockScaling`, after DeepSeek-V3). Scales are powers of two, so a cast rounds only once.
use super::amax::greatest;
use super::cast::eight;
use super::transpose::{BLOCK_COLUMNS, BLOCK_ROWS, TILE, Words, put, tiles, write_columns};
use super::{BLOCK, Codec, Eight, Format, Granularity, UNITS, Vec8, pack};
use crate::pointwise::{CubeShape, PointwiseError, buffer, check, cube_max};
use cubecl::prelude::*;
use cubecl::server::Handle;

const _: () = assert!(TILE == BLOCK);

/// Planes of a cube.
const PLANES: usize = UNITS as usize / 32;
/// Most rows and columns.
const MOST: usize = 1 << 24;

/// Exponent of the largest number of a format, which is `1.75 · 2^exponent`.
fn top_exponent(format: Format) -> i32 {
    match format {
        Format::E4m3 => 8,
        Format::E5m2 => 15,
    }
}

/// The largest power of two that takes `amax` to no more than the format's largest number, and its reciprocal; 1 if `amax` is
/// 0, infinite or NaN.
#[cube]
fn power(amax: f32, #[comptime] format: Format) -> (f32, f32) {
    let bits = u32::reinterpret(amax);
    let above = select((bits & 0x7f_ffffu32) > 0x60_0000u32, 1i32, 0i32);
    let exponent = comptime![top_exponent(format) + 127] - i32::cast_from(bits >> 23) - above;
    let exponent = min(exponent, 126i32);
    let is_size = bits > 0u32 && bits < 0x7f80_0000u32;
    let exponent = select(is_size, exponent, 0i32);
    let scale = f32::reinterpret(u32::cast_from(127i32 + exponent) << 23);
    (scale, f32::reinterpret(u32::cast_from(127i32 - exponent) << 23))
}

/// The greatest over the 16 units that read one row.
#[cube]
fn of_row(own: f32) -> f32 {
    let mut top = own;
    #[unroll]
    for i in 0..4u32 {
        top = max(top, plane_shuffle_xor(top, comptime![1u32 << i]));
    }
    top
}

/// The greatest magnitude of element `i` of eight vectors and of those of the rows that the other half of the plane reads.
#[cube]
fn of_column<E: Float>(x: &Array<Vec8<E>>, #[comptime] i: usize) -> f32 {
    let mut top = 0.0f32;
    #[unroll]
    for row in 0..8usize {
        top = max(top, f32::cast_from(x[row].extract(i)).abs());
    }
    max(top, plane_shuffle_xor(top, 16u32))
}

/// A cube for each tile. A unit has two blocks of four rows and eight columns, as in
/// [`cast_tiles`](super::cast::cast_tiles). Every `each` rows have a transpose of their own.
#[cube(launch_unchecked)]
pub fn cast_blocks<E: Float>(
    x: &[Vec8<E>],
    rows_out: &mut [Eight],
    row_inverse: &mut [f32],
    columns_out: &mut [u32],
    column_inverse: &mut [f32],
    rows: u32,
    columns: u32,
    each: u32,
    row_line: u32,
    column_line: u32,
    #[comptime] with_rows: bool,
    #[comptime] with_columns: bool,
    #[comptime] square: bool,
    #[comptime] format: Format,
    #[comptime] codec: Codec,
    #[comptime] cube: CubeShape,
) {
    let mut words = Words::new_slice(comptime![if with_columns { TILE * TILE / 4 } else { 1 }]);
    let mut maxima = Shared::<[f32]>::new_slice(comptime![if square { cube.scratch() } else { PLANES * TILE }]);
    let mut factors = Shared::<[f32]>::new_slice(TILE);
    let across = columns / comptime![TILE as u32];
    let (tile_row, tile_column) = (CUBE_POS_X / across, CUBE_POS_X % across);
    let (quad, group) = (UNIT_POS / comptime![BLOCK_COLUMNS], UNIT_POS % comptime![BLOCK_COLUMNS]);
    let (first_row, first_column) = (tile_row * comptime![TILE as u32], tile_column * comptime![TILE as u32]);
    let width = columns / 8;
    let matrix = first_row / each;
    let start = matrix * each;
    let corner = (first_row + quad * 4) * width + first_column / 8 + group;
    let mut held = Array::<Vec8<E>>::new(8usize);
    #[unroll]
    for i in 0..8usize {
        held[i] = x[(corner + comptime![(i / 4 * 64 + i % 4) as u32] * width) as usize];
    }
    let mut factor = 1.0f32;
    if comptime![square] {
        let mut top = 0.0f32;
        #[unroll]
        for i in 0..8usize {
            top = greatest::<E>(held[i], top);
        }
        let (scale, inverse) = power(cube_max(top, &mut maxima, cube), format);
        factor = scale;
        if UNIT_POS == 0 {
            if comptime![with_rows] {
                row_inverse[(tile_row * row_line + tile_column) as usize] = inverse;
            }
            if comptime![with_columns] {
                let line = matrix * across + tile_column;
                let at = line * column_line + (first_row - start) / comptime![TILE as u32];
                column_inverse[at as usize] = inverse;
            }
        }
    }
    if comptime![with_rows] {
        #[unroll]
        for i in 0..8usize {
            let row = comptime![(i / 4 * 64 + i % 4) as u32];
            let mut scale = factor;
            if comptime![!square] {
                let (own, inverse) = power(of_row(greatest::<E>(held[i], 0.0f32)), format);
                scale = own;
                if group == 0 {
                    row_inverse[(tile_column * rows + first_row + quad * 4 + row) as usize] = inverse;
                }
            }
            rows_out[(corner + row * width) as usize] = eight::<E>(held[i], scale, format, codec);
        }
    }
    if comptime![with_columns] {
        if comptime![!square] {
            #[unroll]
            for i in 0..8usize {
                let top = of_column::<E>(&held, i);
                if UNIT_POS % 32 < 16 {
                    maxima[(UNIT_POS / 32 * comptime![TILE as u32] + group * 8 + comptime![i as u32]) as usize] = top;
                }
            }
            sync_cube();
            if UNIT_POS < comptime![TILE as u32] {
                let mut top = 0.0f32;
                #[unroll]
                for plane in 0..PLANES {
                    top = max(top, maxima[UNIT_POS as usize + comptime![plane * TILE]]);
                }
                let (scale, inverse) = power(top, format);
                factors[UNIT_POS as usize] = scale;
                column_inverse[(tile_row * columns + first_column + UNIT_POS) as usize] = inverse;
            }
            sync_cube();
        }
        #[unroll]
        for i in 0..8usize {
            let mut scale = factor;
            if comptime![!square] {
                scale = factors[(group * 8 + comptime![i as u32]) as usize];
            }
            #[unroll]
            for turn in 0..2usize {
                let first = comptime![turn * 4];
                let word = pack(
                    f32::cast_from(held[first].extract(i)) * scale,
                    f32::cast_from(held[comptime![first + 1]].extract(i)) * scale,
                    f32::cast_from(held[comptime![first + 2]].extract(i)) * scale,
                    f32::cast_from(held[comptime![first + 3]].extract(i)) * scale,
                    format,
                    codec,
                );
                put(&mut words, quad + comptime![turn as u32 * BLOCK_ROWS / 2], group, comptime![i as u32], word);
            }
        }
        sync_cube();
        write_columns(&words, columns_out, start / 4 * columns, first_row - start, first_column, each, columns);
    }
}

/// One form of what a cast writes: a byte a number, and the reciprocals of the scales in the order of
/// [`Granularity::scales`].
#[derive(Clone, Copy, Debug)]
pub struct Written<'a> {
    /// The numbers.
    pub bytes: &'a Handle,
    /// The reciprocals, fp32.
    pub inverse: &'a Handle,
}

/// Casts `x [matrices · rows, columns]` of type `E` (2 bytes) without gaps to `by_rows`, to `by_columns`, the matrices'
/// transposes `[columns, rows]` one after the other with scales along their own rows, or to both. Both sides are multiples of
/// [`BLOCK`], and vectors have one matrix.
///
/// # Errors
/// If a side is no multiple of [`BLOCK`], all numbers have one scale, or a buffer is too short.
pub fn cast<E: Float>(
    client: &Client,
    x: &Handle,
    [by_rows, by_columns]: [Option<Written>; 2],
    (granularity, format, codec): (Granularity, Format, Codec),
    [matrices, each, columns]: [usize; 3],
) -> Result<(), PointwiseError> {
    let rows = matrices * each;
    check("rows of a matrix", each, BLOCK, MOST)?;
    check("rows", rows, BLOCK, MOST)?;
    check("columns", columns, BLOCK, MOST)?;
    check("scales of a tensor", usize::from(granularity != Granularity::Tensor), 1, 1)?;
    check("matrices", matrices, 1, if granularity == Granularity::Block { MOST } else { 1 })?;
    let len = rows * columns;
    let cube = CubeShape::of(client);
    let unused = client.empty(8);
    let of = |written: Option<Written>, width: usize, sides: [usize; 2]| {
        let line = granularity.scales(sides[0], sides[1]);
        let (bytes, inverse, count, scales) = match written {
            Some(Written { bytes, inverse }) => (bytes, inverse, len / width, matrices * line[0] * line[1]),
            None => (&unused, &unused, 1, 1),
        };
        let bytes = buffer("bytes", bytes, count, width)?;
        Ok::<_, PointwiseError>((bytes, buffer("scales", inverse, scales, 4)?, line[1] as u32))
    };
    let (rows_out, row_inverse, row_line) = of(by_rows, 8, [each, columns])?;
    let (columns_out, column_inverse, column_line) = of(by_columns, 4, [columns, each])?;
    let x = buffer("x", x, len / 8, 16)?;
    // SAFETY: the tiles make up the matrix, and what is not wanted is not written.
    unsafe {
        launch_kernel!(cast_blocks<E>, client, tiles(rows, columns), CubeDim::new_1d(UNITS);
            x, rows_out, row_inverse, columns_out, column_inverse;
            rows as u32, columns as u32, each as u32, row_line, column_line,
            by_rows.is_some(), by_columns.is_some(), granularity == Granularity::Block, format, codec, cube)
    };
    Ok(())
}
