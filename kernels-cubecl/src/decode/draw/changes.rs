//! Logits of which some are changed before the draw.
#![allow(missing_docs, reason = "the launch macros write public items without documentation")]

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{CHANGE, NEVER, words};
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
pub fn change(logits: &mut [f32], at: &[i32], by: &[f32], count: u32) {
    let nth = (CUBE_POS_X * CUBE_DIM_X + UNIT_POS) as usize;
    if nth < count as usize {
        let (place, by_here) = (at[nth] as usize, CHANGE * nth);
        let logit = logits[place] + by[by_here];
        let times = by[by_here + 1];
        let logit = select(logit < 0.0f32, logit * times, logit / times) - by[by_here + 2];
        let size = select(logit < 0.0f32, -logit, logit);
        // No number stays none.
        logits[place] = select(logit <= f32::new(NEVER), f32::new(NEVER), logit + size * by[by_here + 3]);
    }
}

/// A unit has a vector of a row: a number whose bit is 0 does not come, but for one that is not finite.
#[cube(launch_unchecked)]
pub fn keep(logits: &mut [Vec8<f32>], bits: &[u32], rows: &[i32], width: u32) {
    let column = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if column < width {
        let bits = bits[(CUBE_POS_Y * width.div_ceil(4u32) + column / 4) as usize] >> (column % 4 * 8);
        let at = (rows[CUBE_POS_Y as usize] as u32 * width + column) as usize;
        let numbers = logits[at];
        let mut left = numbers;
        #[unroll]
        for i in 0..8usize {
            let number = numbers.extract(i);
            let is_finite = number > f32::new(-3.0e38) && number < f32::new(3.0e38);
            let goes = (bits >> comptime![i as u32]) & 1 == 0 && is_finite;
            left.insert(i, select(goes, f32::new(NEVER), number));
        }
        logits[at] = left;
    }
}

/// `out [rows, columns]` in fp32: `logits`, of which each place in `at [count]`, i32 and all different, has the change whose
/// numbers are a row of `by [count, 4]` ([`LogitChange`](super::LogitChange)); and then, in each row of `rows [kept]`, i32
/// and all different, those alone whose bit of `bits [kept, words]` is 1.
///
/// # Errors
/// If there is no kernel for these sizes, or a buffer is too small.
pub fn changed<E: Float>(
    client: &Client,
    [rows, columns]: [usize; 2],
    logits: &Handle,
    [(at, by, count), (kept, bits, masks)]: [(&Handle, &Handle, usize); 2],
    out: &Handle,
) -> Result<(), PointwiseError> {
    check("columns", columns, 8, i32::MAX as usize)?;
    check("rows", rows, 1, i32::MAX as usize / columns)?;
    check("changes", count.max(1), 1, rows * columns)?;
    check("rows of which some come", masks.max(1), 1, rows.min(u16::MAX as usize))?;
    let (width, cube) = (columns / 8, CubeShape::of(client));
    let (from, to) =
        (buffer("logits", logits, rows * width, 8 * size_of::<E>())?, || buffer("out", out, rows * width, 32));
    // SAFETY: the buffers hold all vectors, changes and bits; places and rows are those of the caller's tokens.
    unsafe {
        launch_kernel!(widen<E>, client, cube.line(rows * width), cube.dim(); from, to()?, (rows * width) as u32);
    }
    if count > 0 {
        let (at, by) = (buffer("places", at, count, 4)?, buffer("changes", by, CHANGE * count, 4)?);
        let numbers = buffer("out", out, rows * columns, 4)?;
        // SAFETY: as above.
        unsafe {
            launch_kernel!(change, client, cube.line(count), cube.dim(); numbers, at, by, count as u32);
        }
    }
    if masks > 0 {
        let (bits, kept) = (buffer("bits", bits, masks * words(columns), 4)?, buffer("their rows", kept, masks, 4)?);
        let cubes = CubeCount::Static(width.div_ceil(cube.units as usize) as u32, masks as u32, 1);
        // SAFETY: as above.
        unsafe {
            launch_kernel!(keep, client, cubes, cube.dim(); to()?, bits, kept, width as u32);
        }
    }
    Ok(())
}
