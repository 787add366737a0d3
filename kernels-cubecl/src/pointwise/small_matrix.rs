//! Rows of two or four numbers times one matrix of two or four columns, which a GEMM computes at a small part of the
//! bandwidth: rotary positions are written so in burn-nn.
use super::{CubeShape, MOST, PointwiseError, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// A matrix that all rows are multiplied by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SmallMatrix {
    /// Numbers of a row before.
    pub rows: usize,
    /// Numbers of a row after.
    pub columns: usize,
    /// From an element to that of the next row and column.
    pub strides: [usize; 2],
}

impl SmallMatrix {
    /// Whether there is a kernel for so many rows of the left operand.
    pub fn has_kernel(self, rows: usize) -> bool {
        let is_small = |size| [2, 4].contains(&size);
        is_small(self.rows) && is_small(self.columns) && check("numbers", rows * self.columns, 8, MOST).is_ok()
    }
}

/// A unit for each eight numbers of the output.
#[cube(launch_unchecked)]
pub fn multiply_small<E: Float, O: Float>(
    x: &[Vector<E, Const<4>>],
    matrix: &[E],
    out: &mut [Vector<O, Const<8>>],
    total: u32,
    #[comptime] of: SmallMatrix,
) {
    let at = (CUBE_POS_X * CUBE_DIM_X + UNIT_POS) as usize;
    if at < total as usize {
        let vectors = comptime![2 * of.rows / of.columns];
        let mut held = Array::<f32>::new(comptime![4 * vectors]);
        #[unroll]
        for v in 0..vectors {
            let four = x[at * vectors + v];
            #[unroll]
            for i in 0..4usize {
                held[v * 4 + i] = f32::cast_from(four.extract(i));
            }
        }
        let mut result = Vector::<O, Const<8>>::empty();
        #[unroll]
        for i in 0..8usize {
            let (row, column) = comptime![(i / of.columns, i % of.columns)];
            let mut sum = 0.0f32;
            #[unroll]
            for k in 0..comptime![of.rows] {
                let factor = matrix[comptime![k * of.strides[0] + column * of.strides[1]]];
                sum += held[comptime![row * of.rows + k]] * f32::cast_from(factor);
            }
            result.insert(i, O::cast_from(sum));
        }
        out[at] = result;
    }
}

/// `out [rows, of.columns] = x [rows, of.rows] · matrix`, added in fp32; `x` and `out` have no gaps.
///
/// # Errors
/// If there is no kernel for these sizes, or a buffer is too short.
pub fn multiply<E: Float, O: Float>(
    client: &Client,
    x: &Handle,
    matrix: &Handle,
    out: &Handle,
    rows: usize,
    of: SmallMatrix,
) -> Result<(), PointwiseError> {
    if !of.has_kernel(rows) {
        return Err(PointwiseError::Shape { shape: format!("{rows} rows by {of:?}") });
    }
    let total = rows * of.columns / 8;
    let x = buffer("x", x, rows * of.rows / 4, 4 * size_of::<E>())?;
    let span = (of.rows - 1) * of.strides[0] + (of.columns - 1) * of.strides[1] + 1;
    let (matrix, out) =
        (buffer("the matrix", matrix, span, size_of::<E>())?, buffer("out", out, total, 8 * size_of::<O>())?);
    let cube = CubeShape::of(client);
    // SAFETY: units past the last vector do nothing, and the buffers hold all rows and the matrix.
    unsafe {
        launch_kernel!(multiply_small<E, O>, client, cube.line(total), cube.dim(); x, matrix, out; total as u32; of)
    };
    Ok(())
}
