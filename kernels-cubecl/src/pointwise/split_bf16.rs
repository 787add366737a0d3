//! Splits fp32 numbers into sums of three bf16 numbers, which together have as many digits: GEMMs of fp32 with bf16
//! operands on matrix units (bf16x3).
use super::{CubeShape, PointwiseError, Vec8, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::bf16;

/// A unit for each vector of `x`, whose rows have `columns` vectors.
#[cube(launch_unchecked)]
pub fn split_bf16(x: &[Vec8<f32>], terms: &mut [Vec8<bf16>], vectors: u32, columns: u32) {
    let at = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if at < vectors {
        let value = x[at as usize];
        let mut high = Vec8::<bf16>::empty();
        let mut middle = Vec8::<bf16>::empty();
        let mut low = Vec8::<bf16>::empty();
        #[unroll]
        for i in 0..8usize {
            let number = value.extract(i);
            let first = bf16::cast_from(number);
            // The rounding error is an fp32 number.
            let rest = number - f32::cast_from(first);
            let second = bf16::cast_from(rest);
            high.insert(i, first);
            middle.insert(i, second);
            low.insert(i, bf16::cast_from(rest - f32::cast_from(second)));
        }
        let first = ((at / columns) * 3 * columns + at % columns) as usize;
        terms[first] = high;
        terms[first + columns as usize] = middle;
        terms[first + 2 * columns as usize] = low;
    }
}

/// Whether there is a kernel for this many columns.
pub fn has_kernel(rows: usize, columns: usize) -> bool {
    check_shape(rows, columns).is_ok()
}

/// `terms [rows, 3 columns] = [high | middle | low]` in bf16, whose sum is `x [rows, columns]` in fp32, except for
/// digits below the least bf16 number; neither has gaps.
///
/// # Errors
/// If there is no kernel for this many columns, or a buffer is too short.
pub fn split(client: &Client, x: &Handle, terms: &Handle, rows: usize, columns: usize) -> Result<(), PointwiseError> {
    check_shape(rows, columns)?;
    let (cube, vectors) = (CubeShape::of(client), rows * columns / 8);
    let (x, terms) = (buffer("x", x, vectors, 32)?, buffer("terms", terms, 3 * vectors, 16)?);
    // SAFETY: units past the last vector do nothing, and the buffers hold all rows.
    unsafe {
        launch_kernel!(split_bf16, client, cube.line(vectors), cube.dim();
            x, terms; vectors as u32, (columns / 8) as u32)
    };
    Ok(())
}

fn check_shape(rows: usize, columns: usize) -> Result<(), PointwiseError> {
    check("columns", columns, 8, i32::MAX as usize / 3)?;
    check("rows", rows, 1, i32::MAX as usize / (3 * columns / 8))
}
