//! The local part of a reduce-scatter: the sum of a rank's own slice and the slices received from other ranks, always
//! in the same order.
use super::{CubeShape, MOST, PointwiseError, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Bytes that a unit reads of a slice at a time.
const ACCESS: usize = 16;

/// `out = local + Σ slices`, in `A`, rounded once.
#[cube(launch_unchecked)]
pub fn reduce_slices<E: Float, A: Float, N: Size>(
    local: &[Vector<E, N>],
    slices: &[Vector<E, N>],
    out: &mut [Vector<E, N>],
    vectors: u32,
    #[comptime] count: usize,
) {
    let index = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if index < vectors {
        let at = index as usize;
        let mut held = Array::<Vector<E, N>>::new(count);
        #[unroll]
        for i in 0..count {
            held[i] = slices[comptime![i] * vectors as usize + at];
        }
        let mut sum = Vector::<A, N>::cast_from(local[at]);
        #[unroll]
        for i in 0..count {
            sum += Vector::<A, N>::cast_from(held[i]);
        }
        out[at] = Vector::<E, N>::cast_from(sum);
    }
}

/// Writes to `out` the sum of `local` and of the `count` slices that lie one after the other in `slices`; all have
/// `len` numbers of type `E` and are summed in `A`.
///
/// # Errors
/// If a buffer is too short.
pub fn sum<E: Float, A: Float>(
    client: &Client,
    [local, slices, out]: [&Handle; 3],
    count: usize,
    len: usize,
) -> Result<(), PointwiseError> {
    let size = size_of::<E>();
    let starts = [local, slices, out].map(|handle| handle.offset_start.unwrap_or(0) as usize);
    let aligned = starts.iter().all(|start| start.is_multiple_of(ACCESS)) && (len * size).is_multiple_of(ACCESS);
    let lanes = if aligned { ACCESS / size } else { 1 };
    check("len", len, lanes, lanes * MOST)?;
    let (cube, vectors) = (CubeShape::of(client), len / lanes);
    let local = buffer("own", local, len, size)?;
    let slices = buffer("slices", slices, count * len, size)?;
    let out = buffer("out", out, len, size)?;
    // SAFETY: units past the last vector do nothing.
    unsafe {
        launch_kernel!(reduce_slices<E, A>, client, cube.line(vectors), cube.dim(), lanes;
            local, slices, out; vectors as u32; count)
    };
    Ok(())
}
