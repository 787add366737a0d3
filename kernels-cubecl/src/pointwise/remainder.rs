//! fp32 numbers as bf16 weights and 16-bit remainders ([`crate::narrow::split`]), and back.
use super::{CubeShape, F32x4, PointwiseError, buffer, check};
use crate::narrow::kernel::{self as narrow, Halves};
use cubecl::prelude::*;
use cubecl::server::Handle;

#[cube(launch_unchecked)]
pub fn split_masters(values: &[F32x4], weight: &mut [Halves], remainder: &mut [Halves], vectors: u32) {
    let at = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if at < vectors {
        let (upper, lower) = narrow::split_vector(values[at as usize]);
        weight[at as usize] = upper;
        remainder[at as usize] = lower;
    }
}

#[cube(launch_unchecked)]
pub fn join_masters(weight: &[Halves], remainder: &[Halves], values: &mut [F32x4], vectors: u32) {
    let at = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if at < vectors {
        values[at as usize] = narrow::join_vector(weight[at as usize], remainder[at as usize]);
    }
}

/// Splits `len` fp32 `values` into bf16 `weight` and `remainder`.
///
/// # Errors
/// If a buffer is too short, or `len` is no multiple of four.
pub fn split(
    client: &Client,
    values: &Handle,
    (weight, remainder): (&Handle, &Handle),
    len: usize,
) -> Result<(), PointwiseError> {
    check("len", len, 4, u32::MAX as usize - 3)?;
    let (cube, vectors) = (CubeShape::of(client), len / 4);
    let values = buffer("values", values, vectors, 16)?;
    let (weight, remainder) = (buffer("weight", weight, vectors, 8)?, buffer("remainder", remainder, vectors, 8)?);
    // SAFETY: units past the last vector do nothing.
    unsafe {
        launch_kernel!(split_masters, client, cube.line(vectors), cube.dim(); values, weight, remainder; vectors as u32)
    };
    Ok(())
}

/// Joins `len` bf16 weights and remainders to fp32 `values`.
pub fn join(
    client: &Client,
    (weight, remainder): (&Handle, &Handle),
    values: &Handle,
    len: usize,
) -> Result<(), PointwiseError> {
    check("len", len, 4, u32::MAX as usize - 3)?;
    let (cube, vectors) = (CubeShape::of(client), len / 4);
    let (weight, remainder) = (buffer("weight", weight, vectors, 8)?, buffer("remainder", remainder, vectors, 8)?);
    let values = buffer("values", values, vectors, 16)?;
    // SAFETY: units past the last vector do nothing.
    unsafe {
        launch_kernel!(join_masters, client, cube.line(vectors), cube.dim(); weight, remainder, values; vectors as u32)
    };
    Ok(())
}
