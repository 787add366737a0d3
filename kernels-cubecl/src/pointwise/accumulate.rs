//! `sum += value`, or `sum = value`, in fp32.
use super::{CubeShape, MOST, PointwiseError, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

#[cube(launch_unchecked)]
fn accumulate_vectors<E: Float, N: Size>(
    value: &[Vector<E, N>],
    sum: &mut [Vector<f32, N>],
    vectors: u32,
    #[comptime] add: bool,
) {
    let index = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if index < vectors {
        let at = index as usize;
        let mut total = Vector::<f32, N>::cast_from(value[at]);
        if comptime![add] {
            total = total + sum[at];
        }
        sum[at] = total;
    }
}

/// Adds the `len` numbers of `value`, of type `E`, to those of `sum` in fp32, or with `add` false replaces them.
/// Neither has gaps; both may start at any element.
pub fn accumulate<E: Float>(
    client: &Client,
    value: &Handle,
    sum: &Handle,
    len: usize,
    add: bool,
) -> Result<(), PointwiseError> {
    let aligned = [value, sum].iter().all(|handle| handle.offset_start.unwrap_or(0).is_multiple_of(16));
    let lanes = if aligned && len.is_multiple_of(4) { 4 } else { 1 };
    check("len", len, lanes, lanes * MOST)?;
    let (cube, vectors) = (CubeShape::of(client), len / lanes);
    let (value, sum) = (buffer("value", value, len, size_of::<E>())?, buffer("sum", sum, len, 4)?);
    // SAFETY: units past the last vector do nothing.
    unsafe {
        launch_kernel!(accumulate_vectors<E>, client, cube.line(vectors), cube.dim(), lanes;
            value, sum; vectors as u32; add)
    };
    Ok(())
}
