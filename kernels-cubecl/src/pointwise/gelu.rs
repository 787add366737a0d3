//! GELU, exact and by its tanh approximation, and its gradient.
use super::sigmoid::sigmoid;
use super::{CubeShape, PointwiseError, Vec8, buffer, check};
use crate::hopper::ptx;
use cubecl::prelude::*;
use cubecl::server::Handle;

const LOG2_E: f32 = core::f32::consts::LOG2_E;
const SQRT_HALF: f32 = core::f32::consts::FRAC_1_SQRT_2;
/// `√(2/π)`.
const SQRT_2_OVER_PI: f32 = 0.797_884_6;
/// Coefficient of the cube in the tanh approximation.
const CUBE: f32 = 0.044_715;

/// `(Φ, Φ')` with `gelu(x) = x Φ(x)`, by `½ (1 + tanh u) = σ(2u)`.
#[cube]
pub(super) fn tanh_gate(x: f32) -> (f32, f32) {
    let square = x * x;
    let phi = sigmoid(2.0 * SQRT_2_OVER_PI * x * (1.0 + CUBE * square));
    (phi, 2.0 * SQRT_2_OVER_PI * phi * (1.0 - phi) * (1.0 + 3.0 * CUBE * square))
}

/// `(Φ, Φ')` of the normal distribution. The tail is Abramowitz and Stegun 7.1.26: its absolute error is under 1e-7,
/// its relative one at most 1 % down to x = -8.
#[cube]
pub(crate) fn normal_gate(x: f32) -> (f32, f32) {
    let bell = ptx::exp2(-0.5 * LOG2_E * x * x);
    let t = ptx::reciprocal(1.0 + 0.327_591_1 * SQRT_HALF * max(x, -x));
    let tail = (((1.061_405_4 * t - 1.453_152) * t + 1.421_413_7) * t - 0.284_496_74) * t + 0.254_829_6;
    let tail = 0.5 * tail * t * bell;
    (select(x < 0.0, tail, 1.0 - tail), 0.5 * SQRT_2_OVER_PI * bell)
}

#[cube]
fn gate(x: f32, #[comptime] tanh: bool) -> (f32, f32) {
    if comptime![tanh] { tanh_gate(x) } else { normal_gate(x) }
}

#[cube(launch_unchecked)]
pub fn gelu_forward<E: Float>(x: &[Vec8<E>], out: &mut [Vec8<E>], vectors: u32, #[comptime] tanh: bool) {
    let at = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if at < vectors {
        let value = x[at as usize];
        let mut result = Vec8::<E>::empty();
        #[unroll]
        for i in 0..8usize {
            let x = f32::cast_from(value.extract(i));
            let (phi, _) = gate(x, tanh);
            result.insert(i, E::cast_from(x * phi));
        }
        out[at as usize] = result;
    }
}

#[cube(launch_unchecked)]
pub fn gelu_backward<E: Float>(
    x: &[Vec8<E>],
    dout: &[Vec8<E>],
    dx: &mut [Vec8<E>],
    vectors: u32,
    #[comptime] tanh: bool,
) {
    let at = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if at < vectors {
        let (value, given) = (x[at as usize], dout[at as usize]);
        let mut result = Vec8::<E>::empty();
        #[unroll]
        for i in 0..8usize {
            let x = f32::cast_from(value.extract(i));
            let (phi, dy) = gate(x, tanh);
            result.insert(i, E::cast_from(f32::cast_from(given.extract(i)) * (phi + x * dy)));
        }
        dx[at as usize] = result;
    }
}

/// Whether there is a kernel for this many elements.
pub fn has_kernel(len: usize) -> bool {
    check("len", len, 8, 8 * i32::MAX as usize).is_ok()
}

/// `out` from `x`, `len` numbers of type `E` (2 bytes); by the tanh approximation if `tanh`.
pub fn forward<E: Float>(
    client: &Client,
    x: &Handle,
    out: &Handle,
    len: usize,
    tanh: bool,
) -> Result<(), PointwiseError> {
    check("len", len, 8, 8 * i32::MAX as usize)?;
    let (cube, vectors) = (CubeShape::of(client), len / 8);
    let (x, out) = (buffer("x", x, vectors, 8 * size_of::<E>())?, buffer("out", out, vectors, size_of::<Vec8<E>>())?);
    // SAFETY: units past the last vector do nothing.
    unsafe {
        gelu_forward::launch_unchecked::<E>(client, cube.line(vectors), cube.dim(), x, out, vectors as u32, tanh)
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
    tanh: bool,
) -> Result<(), PointwiseError> {
    check("len", len, 8, 8 * i32::MAX as usize)?;
    let (cube, vectors) = (CubeShape::of(client), len / 8);
    let (x, dout) =
        (buffer("x", x, vectors, 8 * size_of::<E>())?, buffer("out_gradient", dout, vectors, size_of::<Vec8<E>>())?);
    let dx = buffer("x_gradient", dx, vectors, 8 * size_of::<E>())?;
    // SAFETY: units past the last vector do nothing.
    unsafe {
        gelu_backward::launch_unchecked::<E>(client, cube.line(vectors), cube.dim(), x, dout, dx, vectors as u32, tanh)
    };
    Ok(())
}
