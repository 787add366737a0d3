//! Short rows in fp32 divided by their sums, and softmax, which divides the exponentials by theirs: a plane for each
//! row.
use super::cube::{plane_greatest, plane_total};
use super::{CubeShape, PointwiseError, buffer, check};
use crate::hopper::ptx;
use cubecl::prelude::*;
use cubecl::server::Handle;
use std::f32::consts::LOG2_E;

/// Most columns.
const LONGEST: usize = 1024;

/// Sizes of a call: `x [rows, columns]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormalizeShape {
    /// Rows.
    pub rows: usize,
    /// Numbers of a row.
    pub columns: usize,
    /// Softmax: normalise `exp(x - max x)` instead of `x`.
    pub softmax: bool,
}

impl NormalizeShape {
    /// Whether there are kernels for this shape.
    pub fn has_kernel(&self) -> bool {
        self.check().is_ok()
    }

    fn check(&self) -> Result<(), PointwiseError> {
        check("columns", self.columns, 1, LONGEST)?;
        check("rows", self.rows, 1, i32::MAX as usize / self.columns)
    }

    /// Cubes of the client, and the numbers of a unit.
    fn cubes(&self, cube: CubeShape) -> (CubeCount, u32) {
        let count = self.rows.div_ceil(cube.planes()) as u32;
        (CubeCount::Static(count, 1, 1), (self.columns as u32).div_ceil(cube.plane))
    }
}

/// The plane's row, its offset, and the unit's position in it. Past the last row, that row is read again.
#[cube]
fn plane_row(rows: u32, columns: u32, #[comptime] cube: CubeShape) -> (u32, u32, u32) {
    let row = CUBE_POS_X * comptime![cube.planes() as u32] + UNIT_POS / comptime![cube.plane];
    (row, min(row, rows - 1) * columns, UNIT_POS % comptime![cube.plane])
}

/// A unit takes every n-th number of a row, `count` in all; past the end the last one is read again.
#[cube(launch_unchecked)]
pub fn normalize_rows(
    x: &[f32],
    y: &mut [f32],
    totals: &mut [f32],
    eps: f32,
    rows: u32,
    columns: u32,
    #[comptime] count: u32,
    #[comptime] softmax: bool,
    #[comptime] cube: CubeShape,
) {
    let plane = comptime![cube.plane];
    let (row, first, unit) = plane_row(rows, columns, cube);
    let mut values = Array::<f32>::new(comptime![count as usize]);
    #[unroll]
    for i in 0..count {
        values[comptime![i as usize]] = x[(first + min(unit + comptime![i * plane], columns - 1)) as usize];
    }
    if comptime![softmax] {
        let mut greatest = values[0usize];
        #[unroll]
        for i in 1..count {
            greatest = max(greatest, values[comptime![i as usize]]);
        }
        let greatest = plane_greatest(greatest, cube);
        #[unroll]
        for i in 0..count {
            let slot = comptime![i as usize];
            values[slot] = ptx::exp2((values[slot] - greatest) * LOG2_E);
        }
    }
    let mut sum = 0.0f32;
    #[unroll]
    for i in 0..count {
        sum += select(unit + comptime![i * plane] < columns, values[comptime![i as usize]], 0.0f32);
    }
    let total = plane_total(sum, cube) + eps;
    let factor = ptx::reciprocal(total);
    if row < rows {
        #[unroll]
        for i in 0..count {
            let column = unit + comptime![i * plane];
            if column < columns {
                y[(first + column) as usize] = values[comptime![i as usize]] * factor;
            }
        }
        if unit == 0 {
            totals[row as usize] = total;
        }
    }
}

/// Units as in [`normalize_rows`].
#[cube(launch_unchecked)]
pub fn normalize_gradients(
    y: &[f32],
    totals: &[f32],
    y_gradient: &[f32],
    x_gradient: &mut [f32],
    rows: u32,
    columns: u32,
    #[comptime] count: u32,
    #[comptime] softmax: bool,
    #[comptime] cube: CubeShape,
) {
    let plane = comptime![cube.plane];
    let (row, first, unit) = plane_row(rows, columns, cube);
    let mut shares = Array::<f32>::new(comptime![count as usize]);
    let mut dys = Array::<f32>::new(comptime![count as usize]);
    #[unroll]
    for i in 0..count {
        let (slot, place) = (comptime![i as usize], first + min(unit + comptime![i * plane], columns - 1));
        shares[slot] = y[place as usize];
        dys[slot] = y_gradient[place as usize];
    }
    let mut sum = 0.0f32;
    #[unroll]
    for i in 0..count {
        let slot = comptime![i as usize];
        sum += select(unit + comptime![i * plane] < columns, shares[slot] * dys[slot], 0.0f32);
    }
    let along = plane_total(sum, cube);
    let factor = ptx::reciprocal(totals[min(row, rows - 1) as usize]);
    if row < rows {
        #[unroll]
        for i in 0..count {
            let (slot, column) = (comptime![i as usize], unit + comptime![i * plane]);
            if column < columns {
                let mut dy = dys[slot] - along;
                if comptime![softmax] {
                    dy *= shares[slot];
                } else {
                    dy *= factor;
                }
                x_gradient[(first + column) as usize] = dy;
            }
        }
    }
}

/// `y = x / totals` for `totals [rows]`, the sums of `x [rows, columns]` over the columns plus `eps`; for softmax with
/// `exp(x - max x)` instead of `x`. All fp32 without gaps.
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too short.
pub fn forward(
    client: &Client,
    x: &Handle,
    [y, totals]: [&Handle; 2],
    eps: f32,
    shape: NormalizeShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let (len, cube) = (shape.rows * shape.columns, CubeShape::of(client));
    let (cubes, count) = shape.cubes(cube);
    let (x, y, totals) = (buffer("x", x, len, 4)?, buffer("y", y, len, 4)?, buffer("totals", totals, shape.rows, 4)?);
    // SAFETY: every unit stays in its row, and the buffers hold all rows.
    unsafe {
        launch_kernel!(normalize_rows, client, cubes, cube.dim();
            x, y, totals; eps, shape.rows as u32, shape.columns as u32; count, shape.softmax, cube)
    };
    Ok(())
}

/// The gradient of `x` in [`forward`], from its outputs and the gradient of `y`.
pub fn backward(
    client: &Client,
    [y, totals]: [&Handle; 2],
    y_gradient: &Handle,
    x_gradient: &Handle,
    shape: NormalizeShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let (len, cube) = (shape.rows * shape.columns, CubeShape::of(client));
    let (cubes, count) = shape.cubes(cube);
    let (y, totals) = (buffer("y", y, len, 4)?, buffer("totals", totals, shape.rows, 4)?);
    let (y_gradient, x_gradient) =
        (buffer("y_gradient", y_gradient, len, 4)?, buffer("x_gradient", x_gradient, len, 4)?);
    // SAFETY: every unit stays in its row, and the buffers hold all rows.
    unsafe {
        launch_kernel!(normalize_gradients, client, cubes, cube.dim();
            y, totals, y_gradient, x_gradient; shape.rows as u32, shape.columns as u32; count, shape.softmax, cube)
    };
    Ok(())
}
