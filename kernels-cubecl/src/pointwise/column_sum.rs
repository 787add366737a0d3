//! Sums over all rows of a matrix in fp32: the gradient of a bias.
use super::parts::{PARTS, sum_parts};
use super::{CubeShape, PointwiseError, Vec8, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Units that keep any card of today busy.
const BUSY: usize = 1 << 17;
/// Most elements, for 32-bit positions.
const MOST: usize = 8 * i32::MAX as usize;

/// A unit for every vector of a row and every slice: the `slices`th rows from the slice's number on. Its sums are the
/// vector's part of the slice's row of `parts`.
#[cube(launch_unchecked)]
pub fn sum_slices<E: Float>(x: &[Vec8<E>], parts: &mut [f32], rows: u32, width: u32, slices: u32) {
    let unit = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if unit < slices * width {
        let (slice, column) = (unit / width, unit % width);
        let mut sum = Array::<f32>::new(8usize);
        #[unroll]
        for i in 0..8usize {
            sum[i] = 0.0;
        }
        let mut row = slice;
        // Four loads are on their way at a time.
        while row + 3 * slices < rows {
            let a = x[(row * width + column) as usize];
            let b = x[((row + slices) * width + column) as usize];
            let c = x[((row + 2 * slices) * width + column) as usize];
            let d = x[((row + 3 * slices) * width + column) as usize];
            #[unroll]
            for i in 0..8usize {
                let two = f32::cast_from(a.extract(i)) + f32::cast_from(b.extract(i));
                sum[i] = sum[i] + (two + (f32::cast_from(c.extract(i)) + f32::cast_from(d.extract(i))));
            }
            row += 4 * slices;
        }
        while row < rows {
            let a = x[(row * width + column) as usize];
            #[unroll]
            for i in 0..8usize {
                sum[i] = sum[i] + f32::cast_from(a.extract(i));
            }
            row += slices;
        }
        #[unroll]
        for i in 0..8usize {
            parts[unit as usize * 8 + i] = sum[i];
        }
    }
}

/// Slices of `rows` rows of `width` vectors: enough units, but at least four rows for each, and few enough shares to sum.
fn slices(rows: usize, width: usize) -> usize {
    BUSY.div_ceil(width).min(rows.div_ceil(4)).min(PARTS)
}

/// Whether there is a kernel for this many rows and columns.
pub fn has_kernel(rows: usize, columns: usize) -> bool {
    rows > 0 && check("columns", columns, 8, MOST / rows).is_ok()
}

/// `total[c] = Σ x[·, c]`, fp32 `[columns]`, of `x [rows, columns]` of type `E` (2 bytes) without gaps. Deterministic.
///
/// # Errors
/// If there is no kernel for the sizes, or a buffer is too short.
pub fn column_sum<E: Float>(
    client: &Client,
    x: &Handle,
    total: &Handle,
    rows: usize,
    columns: usize,
) -> Result<(), PointwiseError> {
    check("rows", rows, 1, MOST)?;
    check("columns", columns, 8, MOST / rows)?;
    let (cube, width) = (CubeShape::of(client), columns / 8);
    let slices = slices(rows, width);
    let units = slices * width;
    let parts = client.empty(4 * slices * columns);
    let (x, written) =
        (buffer("x", x, rows * width, 8 * size_of::<E>())?, buffer("parts", &parts, slices * columns, 4)?);
    buffer("total", total, columns, 4)?;
    // SAFETY: units past the last slice do nothing, and the others stay within their rows.
    unsafe {
        sum_slices::launch_unchecked::<E>(
            client,
            cube.line(units),
            cube.dim(),
            x,
            written,
            rows as u32,
            width as u32,
            slices as u32,
        )
    };
    sum_parts(client, &parts, total, slices, columns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_fill_a_card_and_are_never_empty() {
        // Rows and vectors of a row: a layer of GPT-3 on one rank, narrow, one row, wide.
        for (rows, width) in [(8192, 1536), (16384, 16), (1, 8), (7, 1 << 20)] {
            let found = slices(rows, width);
            assert!((1..=rows).contains(&found), "{found} slices of {rows} rows");
            assert!(found * width >= BUSY || found * 4 >= rows || found == PARTS);
        }
    }

    #[test]
    fn rows_that_do_not_fill_vectors_have_no_kernel() {
        assert!(has_kernel(39, 512));
        assert!(!has_kernel(39, 37) && !has_kernel(0, 512) && !has_kernel(MOST / 8, 512));
    }
}
