//! Logits of which some are changed before the draw.
#![allow(missing_docs, reason = "the launch macros write public items without documentation")]

use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::pointwise::{CubeShape, PointwiseError, Vec8, buffer, check};

/// A unit copies a vector.
#[cube(launch_unchecked)]
pub fn widen<E: Float>(from: &[Vec8<E>], to: &mut [Vec8<f32>], count: u32) {
    let at = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if at < count {
        to[at as usize] = Vec8::<f32>::cast_from(from[at as usize]);
    }
}

/// A unit changes a logit.
#[cube(launch_unchecked)]
pub fn penalize(logits: &mut [f32], at: &[i32], by: &[f32], count: u32) {
    let nth = (CUBE_POS_X * CUBE_DIM_X + UNIT_POS) as usize;
    if nth < count as usize {
        let place = at[nth] as usize;
        let (logit, times) = (logits[place], by[2 * nth]);
        logits[place] = select(logit < 0.0f32, logit * times, logit / times) - by[2 * nth + 1];
    }
}

/// `out [rows, columns]` in fp32: `logits`, of which each place in `at [count]`, i32 and all different, is divided by the
/// first number of its pair in `by [count, 2]`, or multiplied where it is negative, and then less by the second.
///
/// # Errors
/// If there is no kernel for these sizes, or a buffer is too small.
pub fn penalized<E: Float>(
    client: &Client,
    [rows, columns]: [usize; 2],
    logits: &Handle,
    (at, by, count): (&Handle, &Handle, usize),
    out: &Handle,
) -> Result<(), PointwiseError> {
    check("columns", columns, 8, i32::MAX as usize)?;
    check("rows", rows, 1, i32::MAX as usize / columns)?;
    check("penalties", count, 1, rows * columns)?;
    let width = rows * columns / 8;
    let (from, to) = (buffer("logits", logits, width, 8 * size_of::<E>())?, buffer("fp32 logits", out, width, 32)?);
    let (at, by) = (buffer("places", at, count, 4)?, buffer("penalties", by, 2 * count, 4)?);
    let numbers = buffer("fp32 logits", out, rows * columns, 4)?;
    let cube = CubeShape::of(client);
    // SAFETY: the buffers hold all vectors and pairs; places are those of the caller's tokens.
    unsafe {
        launch_kernel!(widen<E>, client, cube.line(width), cube.dim(); from, to, width as u32);
        launch_kernel!(penalize, client, cube.line(count), cube.dim(); numbers, at, by, count as u32);
    }
    Ok(())
}
