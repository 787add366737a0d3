//! Amax and casts of groups of rows, each group with a scale of its own, in one launch for all of them. The host knows
//! where groups begin and builds tables of the work.
use super::amax::greatest;
use super::cast::{WORDS, cast_tiles};
use super::transpose::{TILE, check_matrix};
use super::{Codec, Format, UNITS, Vec8};
use crate::pointwise::{CubeShape, PointwiseError, buffer, check, cube_max};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Most cubes of the amax, besides one for each group.
const CUBES: usize = 2048;
/// Fewest vectors of a cube: four for each unit.
const FEWEST: usize = 4 * UNITS as usize;

/// The amax of each cube's vectors, from `table[2 i]` to `table[2 i + 1]`.
#[cube(launch_unchecked)]
pub fn part_maxima<E: Float>(x: &[Vec8<E>], table: &[u32], parts: &mut [f32], #[comptime] cube: CubeShape) {
    let mut scratch = Shared::<[f32]>::new_slice(comptime![cube.scratch()]);
    let entry = (CUBE_POS_X * 2) as usize;
    let mut at = table[entry] + UNIT_POS;
    let end = table[entry + 1];
    let mut top = 0.0f32;
    // Four loads are in flight at a time.
    while at + 3 * CUBE_DIM_X < end {
        let a = x[at as usize];
        let b = x[(at + CUBE_DIM_X) as usize];
        let c = x[(at + 2 * CUBE_DIM_X) as usize];
        let d = x[(at + 3 * CUBE_DIM_X) as usize];
        top = greatest::<E>(d, greatest::<E>(c, greatest::<E>(b, greatest::<E>(a, top))));
        at += 4 * CUBE_DIM_X;
    }
    while at < end {
        top = greatest::<E>(x[at as usize], top);
        at += CUBE_DIM_X;
    }
    let top = cube_max(top, &mut scratch, cube);
    if UNIT_POS == 0 {
        parts[CUBE_POS_X as usize] = top;
    }
}

/// A cube for each group: the maximum of its partial results, from `table[first + i]` to `table[first + i + 1]`.
#[cube(launch_unchecked)]
pub fn group_maxima(parts: &[f32], table: &[u32], amax: &mut [f32], first: u32, #[comptime] cube: CubeShape) {
    let mut scratch = Shared::<[f32]>::new_slice(comptime![cube.scratch()]);
    let entry = (first + CUBE_POS_X) as usize;
    let mut at = table[entry] + UNIT_POS;
    let end = table[entry + 1];
    let mut top = 0.0f32;
    while at < end {
        top = max(top, parts[at as usize]);
        at += CUBE_DIM_X;
    }
    let top = cube_max(top, &mut scratch, cube);
    if UNIT_POS == 0 {
        amax[CUBE_POS_X as usize] = top;
    }
}

/// Spans of groups of `lens` vectors: begin and end of each span, then the range of spans of each group, one number
/// more than groups.
fn parts(lens: &[usize], each: usize) -> (Vec<u32>, usize) {
    let (mut spans, mut firsts, mut start) = (Vec::new(), vec![0], 0);
    for len in lens {
        let end = start + len;
        while start < end {
            let next = end.min(start + each);
            spans.extend([start as u32, next as u32]);
            start = next;
        }
        firsts.push((spans.len() / 2) as u32);
    }
    let parts = spans.len() / 2;
    spans.extend(firsts);
    (spans, parts)
}

/// An entry for each `TILE` rows of each group; all are transposed `together`, or each on its own.
fn tiles(counts: &[usize], together: bool) -> Vec<u32> {
    let (mut table, mut start, all) = (Vec::new(), 0, counts.iter().sum());
    for (group, &rows) in counts.iter().enumerate() {
        let matrix = if together { [0, all] } else { [start, rows] };
        for first in (0..rows).step_by(TILE) {
            table.extend([start + first, matrix[0], matrix[1], group].map(|word| word as u32));
        }
        start += rows;
    }
    table
}

fn upload(client: &Client, table: &[u32]) -> Handle {
    client.create_from_slice(&table.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>())
}

/// `amax [groups] = max |x_g|`, fp32, of the groups of `counts` rows of `x [rows, columns]` of type `E` (2 bytes)
/// without gaps; 0 of an empty group.
///
/// # Errors
/// If there is no kernel for the sizes, or a buffer is too short.
pub fn amax<E: Float>(
    client: &Client,
    x: &Handle,
    amax: &Handle,
    counts: &[usize],
    columns: usize,
) -> Result<(), PointwiseError> {
    let rows: usize = counts.iter().sum();
    check("columns", columns, 8, 8 * (u32::MAX as usize / 2) / rows.max(1))?;
    check("rows", rows, 1, u32::MAX as usize / 2)?;
    let (vectors, cube) = (rows * columns / 8, CubeShape::of(client));
    let lens: Vec<usize> = counts.iter().map(|count| count * columns / 8).collect();
    let (table, cubes) = parts(&lens, vectors.div_ceil(CUBES).max(FEWEST));
    let found = client.empty(4 * cubes);
    let (x, target) = (buffer("x", x, vectors, 16)?, buffer("amax", amax, counts.len(), 4)?);
    let (words, table) = (table.len(), upload(client, &table));
    let [spans, firsts] = [buffer("table", &table, words, 4)?, buffer("table", &table, words, 4)?];
    let [written, read] = [buffer("parts", &found, cubes, 4)?, buffer("parts", &found, cubes, 4)?];
    let [count, groups] = [cubes, counts.len()].map(|cubes| CubeCount::Static(cubes as u32, 1, 1));
    // SAFETY: the table has a span of `x` for each cube, which writes its own partial result.
    unsafe { part_maxima::launch_unchecked::<E>(client, count, cube.dim(), x, spans, written, cube) };
    // SAFETY: the table has the range of a group's spans for each cube, after two numbers for each span.
    unsafe { group_maxima::launch_unchecked(client, groups, cube.dim(), read, firsts, target, 2 * cubes as u32, cube) };
    Ok(())
}

/// Format, method and sizes of a cast of groups.
#[derive(Clone, Copy, Debug)]
pub struct GroupConversion<'a> {
    /// The format.
    pub format: Format,
    /// The method.
    pub codec: Codec,
    /// Rows of each group, multiples of 16 or zero.
    pub counts: &'a [usize],
    /// Columns of all, a multiple of 16.
    pub columns: usize,
    /// All groups have one transpose, `[columns, rows of all]`; their rows are multiples of 128 then.
    pub together: bool,
}

/// Casts each group of `x [rows, columns]` of type `E` (2 bytes) without gaps, times its number of `scale [groups]`
/// (fp32), to `by_rows [rows, columns]`, to `by_columns`, the groups' transposes `[columns, rows of the group]` one
/// after the other or that of all `together`, or to both, one byte per number.
///
/// # Errors
/// If there is no kernel for the sizes, or a buffer is too short.
pub fn cast<E: Float>(
    client: &Client,
    x: &Handle,
    scale: &Handle,
    by_rows: Option<&Handle>,
    by_columns: Option<&Handle>,
    conversion: GroupConversion,
) -> Result<(), PointwiseError> {
    let GroupConversion { format, codec, counts, columns, together } = conversion;
    let rows: usize = counts.iter().sum();
    check_matrix(rows, columns)?;
    let multiple = if together { TILE } else { 16 };
    counts.iter().filter(|count| **count > 0).try_for_each(|count| check("rows of a group", *count, multiple, rows))?;
    if by_rows.is_none() && by_columns.is_none() {
        return Ok(());
    }
    let len = rows * columns;
    let table = tiles(counts, together);
    let cubes = table.len() / WORDS * columns.div_ceil(TILE);
    check("tiles", cubes, 1, i32::MAX as usize)?;
    let table = buffer("table", &upload(client, &table), table.len(), 4)?;
    let (x, scale) = (buffer("x", x, len / 8, 16)?, buffer("scale", scale, counts.len(), 4)?);
    let unused = client.empty(8);
    let (rows_out, lines) = by_rows.map_or((&unused, 1), |by_rows| (by_rows, len / 8));
    let (columns_out, words) = by_columns.map_or((&unused, 2), |by_columns| (by_columns, len / 4));
    let (rows_out, columns_out) =
        (buffer("by_rows", rows_out, lines, 8)?, buffer("by_columns", columns_out, words, 4)?);
    // SAFETY: the table's tiles lie in their groups, blocks past a group's last row or the last column do nothing, and
    // a result is written only if it is whole.
    unsafe {
        launch_kernel!(cast_tiles<E>, client, CubeCount::Static(cubes as u32, 1, 1), CubeDim::new_1d(UNITS);
            x, scale, table, rows_out, columns_out; rows as u32, columns as u32;
            by_rows.is_some(), by_columns.is_some(), true, format, codec)
    };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_cut_into_parts_and_tiles() {
        let (table, count) = parts(&[5, 0, 2], 2);
        assert_eq!((&table[..8], &table[8..], count), (&[0, 2, 2, 4, 4, 5, 5, 7][..], &[0, 3, 3, 4][..], 4));
        assert_eq!(tiles(&[144, 0, 16], false), [0, 0, 144, 0, 128, 0, 144, 0, 144, 144, 16, 2]);
        assert_eq!(tiles(&[256, 0, 128], true), [0, 0, 384, 0, 128, 0, 384, 0, 256, 0, 384, 2]);
    }
}
