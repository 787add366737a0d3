//! Squared ReLU, `max(x, 0)²`, and its gradient.
use super::{CubeShape, PointwiseError, Vec8, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

#[cube(launch_unchecked)]
pub fn squared_relu_forward<E: Float>(x: &[Vec8<E>], out: &mut [Vec8<E>], vectors: u32) {
    let at = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if at < vectors {
        let value = x[at as usize];
        let mut result = Vec8::<E>::empty();
        #[unroll]
        for i in 0..8usize {
            let x = f32::cast_from(value.extract(i));
            // Not the maximum, which is a number of a number and NaN.
            let positive = select(x <= 0.0, 0.0, x);
            result.insert(i, E::cast_from(positive * positive));
        }
        out[at as usize] = result;
    }
}

#[cube(launch_unchecked)]
pub fn squared_relu_backward<E: Float>(x: &[Vec8<E>], dout: &[Vec8<E>], dx: &mut [Vec8<E>], vectors: u32) {
    let at = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if at < vectors {
        let (value, given) = (x[at as usize], dout[at as usize]);
        let mut result = Vec8::<E>::empty();
        #[unroll]
        for i in 0..8usize {
            let x = f32::cast_from(value.extract(i));
            // Not the maximum, which is a number of a number and NaN.
            let positive = select(x <= 0.0, 0.0, x);
            result.insert(i, E::cast_from(2.0 * positive * f32::cast_from(given.extract(i))));
        }
        dx[at as usize] = result;
    }
}

/// Whether there is a kernel for this many elements.
pub fn has_kernel(len: usize) -> bool {
    check("len", len, 8, 8 * i32::MAX as usize).is_ok()
}

/// `out` from `x`, `len` numbers of type `E` (2 bytes).
pub fn forward<E: Float>(client: &Client, x: &Handle, out: &Handle, len: usize) -> Result<(), PointwiseError> {
    check("len", len, 8, 8 * i32::MAX as usize)?;
    let (cube, vectors) = (CubeShape::of(client), len / 8);
    let (x, out) = (buffer("x", x, vectors, 8 * size_of::<E>())?, buffer("out", out, vectors, size_of::<Vec8<E>>())?);
    // SAFETY: units past the last vector do nothing.
    unsafe {
        squared_relu_forward::launch_unchecked::<E>(client, cube.line(vectors), cube.dim(), x, out, vectors as u32)
    };
    Ok(())
}

/// The gradient of `x` in [`forward`], given that of `out`.
pub fn backward<E: Float>(
    client: &Client,
    x: &Handle,
    dout: &Handle,
    dx: &Handle,
    len: usize,
) -> Result<(), PointwiseError> {
    check("len", len, 8, 8 * i32::MAX as usize)?;
    let (cube, vectors) = (CubeShape::of(client), len / 8);
    let (x, dout) =
        (buffer("x", x, vectors, 8 * size_of::<E>())?, buffer("out_gradient", dout, vectors, size_of::<Vec8<E>>())?);
    let dx = buffer("x_gradient", dx, vectors, 8 * size_of::<E>())?;
    // SAFETY: units past the last vector do nothing.
    unsafe {
        launch_kernel!(squared_relu_backward<E>, client, cube.line(vectors), cube.dim(); x, dout, dx; vectors as u32)
    };
    Ok(())
}
