//! Activations, element by element, and their gradients: GELU, exact and by its tanh approximation, and squared ReLU.
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

/// An activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// GELU.
    Gelu,
    /// GELU by its tanh approximation.
    GeluTanh,
    /// `max(x, 0)²`.
    SquaredRelu,
}

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

/// The activation of `x`, and its derivative.
#[cube]
fn value_and_slope(x: f32, #[comptime] activation: Activation) -> (f32, f32) {
    match activation {
        Activation::Gelu => {
            let (phi, slope) = normal_gate(x);
            (x * phi, phi + x * slope)
        }
        Activation::GeluTanh => {
            let (phi, slope) = tanh_gate(x);
            (x * phi, phi + x * slope)
        }
        Activation::SquaredRelu => {
            // Not the maximum, which is a number of a number and NaN.
            let positive = select(x <= 0.0, 0.0, x);
            (positive * positive, 2.0 * positive)
        }
    }
}

#[cube(launch_unchecked)]
pub fn activate<E: Float>(x: &[Vec8<E>], out: &mut [Vec8<E>], vectors: u32, #[comptime] activation: Activation) {
    let at = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if at < vectors {
        let value = x[at as usize];
        let mut result = Vec8::<E>::empty();
        #[unroll]
        for i in 0..8usize {
            let (y, _) = value_and_slope(f32::cast_from(value.extract(i)), activation);
            result.insert(i, E::cast_from(y));
        }
        out[at as usize] = result;
    }
}

#[cube(launch_unchecked)]
pub fn activation_gradient<E: Float>(
    x: &[Vec8<E>],
    dout: &[Vec8<E>],
    dx: &mut [Vec8<E>],
    vectors: u32,
    #[comptime] activation: Activation,
) {
    let at = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if at < vectors {
        let (value, given) = (x[at as usize], dout[at as usize]);
        let mut result = Vec8::<E>::empty();
        #[unroll]
        for i in 0..8usize {
            let (_, slope) = value_and_slope(f32::cast_from(value.extract(i)), activation);
            result.insert(i, E::cast_from(f32::cast_from(given.extract(i)) * slope));
        }
        dx[at as usize] = result;
    }
}

/// Whether there is a kernel for this many elements.
pub fn has_kernel(len: usize) -> bool {
    check("len", len, 8, 8 * i32::MAX as usize).is_ok()
}

/// `out` from `x`, `len` numbers of type `E` (2 bytes).
pub fn forward<E: Float>(
    client: &Client,
    x: &Handle,
    out: &Handle,
    len: usize,
    activation: Activation,
) -> Result<(), PointwiseError> {
    check("len", len, 8, 8 * i32::MAX as usize)?;
    let (cube, vectors, vector) = (CubeShape::of(client), len / 8, 8 * size_of::<E>());
    let (x, out) = (buffer("x", x, vectors, vector)?, buffer("out", out, vectors, vector)?);
    // SAFETY: units past the last vector do nothing.
    unsafe { launch_kernel!(activate<E>, client, cube.line(vectors), cube.dim(); x, out; vectors as u32; activation) };
    Ok(())
}

/// The gradient of `x` in [`forward`], given that of `out`.
pub fn backward<E: Float>(
    client: &Client,
    [x, dout, dx]: [&Handle; 3],
    len: usize,
    activation: Activation,
) -> Result<(), PointwiseError> {
    check("len", len, 8, 8 * i32::MAX as usize)?;
    let (cube, vectors, vector) = (CubeShape::of(client), len / 8, 8 * size_of::<E>());
    let (x, dout) = (buffer("x", x, vectors, vector)?, buffer("out_gradient", dout, vectors, vector)?);
    let dx = buffer("x_gradient", dx, vectors, vector)?;
    // SAFETY: units past the last vector do nothing.
    unsafe {
        launch_kernel!(activation_gradient<E>, client, cube.line(vectors), cube.dim();
            x, dout, dx; vectors as u32; activation)
    };
    Ok(())
}
