//! `silu(gate) · up` of rows `[gate | up]`, and its gradient.
use super::{CubeShape, PointwiseError, Vec8, buffer, check};
use crate::hopper::ptx;
use cubecl::prelude::*;
use cubecl::server::Handle;

const LOG2_E: f32 = core::f32::consts::LOG2_E;
/// Longest half row.
const LONGEST: usize = 1 << 24;

/// `1 / (1 + exp(−x))`.
#[cube]
pub(super) fn sigmoid(x: f32) -> f32 {
    ptx::reciprocal(1.0 + ptx::exp2(-x * LOG2_E))
}

/// `silu(gate) · up`.
#[cube]
pub(crate) fn gated(gate: f32, up: f32) -> f32 {
    gate * sigmoid(gate) * up
}

/// The gradient of `gate`, given `dy`, that of [`gated`], and the [`sigmoid`] of the gate. That of `up` is `dy ·
/// gate · sigmoid`.
#[cube]
pub(super) fn gate_gradient(dy: f32, gate: f32, up: f32, sigmoid: f32) -> f32 {
    dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
}

#[cube(launch_unchecked)]
pub fn swiglu_forward<E: Float>(x: &[Vec8<E>], out: &mut [Vec8<E>], half: u32) {
    let column = CUBE_POS_Y * CUBE_DIM_X + UNIT_POS;
    if column < half {
        let at = (CUBE_POS_X * 2 * half + column) as usize;
        let gate = x[at];
        let up = x[at + half as usize];
        let mut result = Vec8::<E>::empty();
        #[unroll]
        for i in 0..8usize {
            let (g, u) = (f32::cast_from(gate.extract(i)), f32::cast_from(up.extract(i)));
            result.insert(i, E::cast_from(gated(g, u)));
        }
        out[(CUBE_POS_X * half + column) as usize] = result;
    }
}

#[cube(launch_unchecked)]
pub fn swiglu_backward<E: Float>(x: &[Vec8<E>], dout: &[Vec8<E>], dx: &mut [Vec8<E>], half: u32) {
    let column = CUBE_POS_Y * CUBE_DIM_X + UNIT_POS;
    if column < half {
        let at = (CUBE_POS_X * 2 * half + column) as usize;
        let gate = x[at];
        let up = x[at + half as usize];
        let dy = dout[(CUBE_POS_X * half + column) as usize];
        let mut gates = Vec8::<E>::empty();
        let mut ups = Vec8::<E>::empty();
        #[unroll]
        for i in 0..8usize {
            let (g, u) = (f32::cast_from(gate.extract(i)), f32::cast_from(up.extract(i)));
            let dy = f32::cast_from(dy.extract(i));
            let s = sigmoid(g);
            gates.insert(i, E::cast_from(gate_gradient(dy, g, u, s)));
            ups.insert(i, E::cast_from(dy * g * s));
        }
        dx[at] = gates;
        dx[at + half as usize] = ups;
    }
}

/// Whether there is a kernel for half rows of this length.
pub fn has_kernel(half: usize) -> bool {
    check("half", half, 8, LONGEST).is_ok()
}

/// `out [rows, half] = silu(gate) · up` of `x [rows, 2 half] = [gate | up]`, of type `E` (2 bytes) and
/// without gaps.
pub fn forward<E: Float>(
    client: &Client,
    x: &Handle,
    out: &Handle,
    rows: usize,
    half: usize,
) -> Result<(), PointwiseError> {
    check("half", half, 8, LONGEST)?;
    let (cube, vectors) = (CubeShape::of(client).fitting(half / 8), rows * half / 8);
    let (x, out) =
        (buffer("x", x, 2 * vectors, 8 * size_of::<E>())?, buffer("out", out, vectors, size_of::<Vec8<E>>())?);
    // SAFETY: every unit stays in its row, and the buffers hold all rows.
    unsafe {
        swiglu_forward::launch_unchecked::<E>(client, cube.rows(rows, half / 8), cube.dim(), x, out, half as u32 / 8)
    };
    Ok(())
}

/// The gradient of `x` in [`forward`], given that of `out`.
pub fn backward<E: Float>(
    client: &Client,
    x: &Handle,
    dout: &Handle,
    dx: &Handle,
    rows: usize,
    half: usize,
) -> Result<(), PointwiseError> {
    check("half", half, 8, LONGEST)?;
    let (cube, vectors) = (CubeShape::of(client).fitting(half / 8), rows * half / 8);
    let (x, dout) = (
        buffer("x", x, 2 * vectors, 8 * size_of::<E>())?,
        buffer("out_gradient", dout, vectors, size_of::<Vec8<E>>())?,
    );
    let dx = buffer("x_gradient", dx, 2 * vectors, 8 * size_of::<E>())?;
    // SAFETY: every unit stays in its row, and the buffers hold all rows.
    unsafe {
        swiglu_backward::launch_unchecked::<E>(
            client,
            cube.rows(rows, half / 8),
            cube.dim(),
            x,
            dout,
            dx,
            half as u32 / 8,
        )
    };
    Ok(())
}
