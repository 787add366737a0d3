//! The launch.

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::super::LONGEST;
use super::{NUMBERS, kernel, search};
use crate::pointwise::{CubeShape, PointwiseError, buffer, check};

/// The drawn columns, `out [rows]` as i32, of `logits [rows, columns]`, given the [numbers](super::Draw::numbers) of each row,
/// `how [rows, NUMBERS]` in fp32; −1 for a row with a number that is not finite, or none that comes. Probabilities are fp32.
///
/// # Errors
/// If there is no kernel for these sizes, or a buffer is too small.
pub fn draw<E: Float>(
    client: &Client,
    [rows, columns]: [usize; 2],
    [logits, how, out]: [&Handle; 3],
) -> Result<(), PointwiseError> {
    check("columns", columns, 8, LONGEST)?;
    check("rows", rows, 1, i32::MAX as usize / (columns / 8))?;
    let width = columns / 8;
    let logits = buffer("logits", logits, rows * width, 8 * size_of::<E>())?;
    let (how, out) = (buffer("what is drawn", how, rows * NUMBERS, 4)?, buffer("out", out, rows, 4)?);
    let cube = CubeShape::of(client).wide();
    let zeros = search::zeros::<E>();
    // SAFETY: every cube stays in its row, and the buffers hold all rows.
    unsafe {
        launch_kernel!(kernel::draw_rows<E>, client, CubeCount::Static(rows as u32, 1, 1), cube.dim();
            logits, how, out; width as u32; zeros, cube)
    };
    Ok(())
}
