//! The likeliest token of each sequence.
#![allow(missing_docs, reason = "the launch macros write public items without documentation")]

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::LONGEST;
use crate::pointwise::{CubeShape, PointwiseError, Vec8, buffer, check, cube_max};

/// Vectors of a unit in flight.
const IN_FLIGHT: usize = 4;

/// A cube takes a row and writes the first column of its greatest number, or −1 if one of them is not finite.
#[cube(launch_unchecked)]
pub fn row_argmax<E: Float>(logits: &[Vec8<E>], out: &mut [i32], width: u32, #[comptime] cube: CubeShape) {
    let mut of_top = Shared::<[f32]>::new_slice(comptime![cube.planes()]);
    let mut of_column = Shared::<[f32]>::new_slice(comptime![cube.planes()]);
    let mut of_broken = Shared::<[f32]>::new_slice(comptime![cube.planes()]);
    let mut top = f32::new(-3.0e38);
    let mut best = 0u32;
    let mut broken = 0.0f32;
    let mut column = UNIT_POS;
    while column < width {
        let mut held = Array::<Vec8<E>>::new(IN_FLIGHT);
        #[unroll]
        for v in 0..IN_FLIGHT {
            let at = column + comptime![v as u32] * CUBE_DIM_X;
            // Past the end the last vector is seen again, whose columns are no better.
            held[v] = logits[(CUBE_POS_X * width + min(at, width - 1)) as usize];
        }
        #[unroll]
        for v in 0..IN_FLIGHT {
            let at = min(column + comptime![v as u32] * CUBE_DIM_X, width - 1);
            let value = held[v];
            #[unroll]
            for i in 0..8usize {
                let logit = f32::cast_from(value.extract(i));
                // False for no number as well.
                let is_finite = logit > f32::new(-3.0e38) && logit < f32::new(3.0e38);
                broken = select(is_finite, broken, 1.0f32);
                let is_better = logit > top;
                best = select(is_better, at * 8 + comptime![i as u32], best);
                top = select(is_better, logit, top);
            }
        }
        column += comptime![IN_FLIGHT as u32] * CUBE_DIM_X;
    }
    let greatest = cube_max(top, &mut of_top, cube);
    let candidate = select(top == greatest, -f32::cast_from(best), f32::new(-3.0e38));
    let first = cube_max(candidate, &mut of_column, cube);
    let broken = cube_max(broken, &mut of_broken, cube);
    if UNIT_POS == 0 {
        out[CUBE_POS_X as usize] = select(broken > 0.0, i32::new(-1), i32::cast_from(-first));
    }
}

/// The likeliest columns, `out [rows]` as i32, of `logits [rows, columns]`; −1 for a row with a number that is not finite.
///
/// # Errors
/// If there is no kernel for these sizes, or a buffer is too small.
pub fn likeliest<E: Float>(
    client: &Client,
    [rows, columns]: [usize; 2],
    logits: &Handle,
    out: &Handle,
) -> Result<(), PointwiseError> {
    check("columns", columns, 8, LONGEST)?;
    check("rows", rows, 1, i32::MAX as usize / (columns / 8))?;
    let width = columns / 8;
    let logits = buffer("logits", logits, rows * width, 8 * size_of::<E>())?;
    let out = buffer("out", out, rows, 4)?;
    let (cube, count) = (CubeShape::of(client), CubeCount::Static(rows as u32, 1, 1));
    // SAFETY: every cube stays in its row, and the buffers hold all rows.
    unsafe { row_argmax::launch_unchecked::<E>(client, count, cube.dim(), logits, out, width as u32, cube) };
    Ok(())
}
