//! A range of columns of all rows, copied from or to a tensor of their own.
use super::{CubeShape, MOST, PointwiseError, Vec8, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// The columns `first..first + columns` of `x [rows, width]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColumnRange {
    /// Rows.
    pub rows: usize,
    /// Columns of `x`.
    pub width: usize,
    /// The first column of the range.
    pub first: usize,
    /// Its length.
    pub columns: usize,
}

impl ColumnRange {
    /// Whether there are kernels for these columns.
    pub fn has_kernel(&self) -> bool {
        self.check().is_ok()
    }

    fn check(&self) -> Result<(), PointwiseError> {
        check("width", self.width, 8, u32::MAX as usize)?;
        check("columns", self.columns, 8, self.width)?;
        check("columns up to the last", self.first + self.columns, 8, self.width)?;
        check("rows", self.rows, 1, MOST / (self.width / 8))
    }
}

/// A unit for each vector that is copied. Lengths are in vectors.
#[cube(launch_unchecked)]
pub fn copy_columns<E: Float>(
    from: &[Vec8<E>],
    to: &mut [Vec8<E>],
    items: u32,
    columns: u32,
    from_width: u32,
    from_first: u32,
    to_width: u32,
    to_first: u32,
) {
    let item = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if item < items {
        let (row, column) = (item / columns, item % columns);
        to[(row * to_width + to_first + column) as usize] = from[(row * from_width + from_first + column) as usize];
    }
}

/// `part [rows, columns]` from the columns of `x`, both of type `E` and without gaps.
///
/// # Errors
/// If a length is no multiple of 8, or a buffer is too short.
pub fn copy_out<E: Float>(
    client: &Client,
    x: &Handle,
    part: &Handle,
    range: ColumnRange,
) -> Result<(), PointwiseError> {
    copy::<E>(client, [x, part], range, [(range.width, range.first), (range.columns, 0)])
}

/// The columns of `x` from `part [rows, columns]`; others stay as they are.
pub fn copy_in<E: Float>(client: &Client, part: &Handle, x: &Handle, range: ColumnRange) -> Result<(), PointwiseError> {
    copy::<E>(client, [part, x], range, [(range.columns, 0), (range.width, range.first)])
}

/// Each of the two tensors has a width and a first column.
fn copy<E: Float>(
    client: &Client,
    handles: [&Handle; 2],
    range: ColumnRange,
    positions: [(usize, usize); 2],
) -> Result<(), PointwiseError> {
    range.check()?;
    let (cube, items) = (CubeShape::of(client), range.rows * range.columns / 8);
    let [(from_width, from_first), (to_width, to_first)] =
        positions.map(|(width, first)| ((width / 8) as u32, (first / 8) as u32));
    let [from, to] = handles;
    let from = buffer("what is copied", from, range.rows * from_width as usize, 8 * size_of::<E>())?;
    let to = buffer("the copy", to, range.rows * to_width as usize, 8 * size_of::<E>())?;
    // SAFETY: every unit stays in its row's columns, and the buffers hold all rows.
    unsafe {
        launch_kernel!(copy_columns<E>, client, cube.line(items), cube.dim();
            from, to; items as u32, (range.columns / 8) as u32, from_width, from_first, to_width, to_first)
    };
    Ok(())
}
