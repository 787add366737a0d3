//! The product of an activation and a value of rows `[gate | up]`, and its gradient: SwiGLU and GeGLU. The clamped SwiGLU
//! of gpt-oss is that of experts, with a factor for each row ([`moe`](super::moe)).
use super::activation::{normal_gate, tanh_gate};
use super::sigmoid::sigmoid;
use super::{CubeShape, PointwiseError, Vec8, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Longest half row.
const LONGEST: usize = 1 << 24;

/// What is computed of a gate and a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gating {
    /// `silu(gate) up`.
    Silu,
    /// `gelu(gate) up`.
    Gelu,
    /// The same with the tanh approximation of GELU.
    GeluTanh,
    /// `c σ(α c) (d + 1)`, where `c` is the gate up to a limit, and `d` is `up` between its negative and the limit.
    Clamped(Clamp),
}

/// `α` and the limit of [`Gating::Clamped`], as the bits of their fp32: what a kernel is compiled for must have a hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Clamp {
    alpha: u32,
    limit: u32,
}

impl Clamp {
    /// With these numbers.
    pub fn new(alpha: f32, limit: f32) -> Self {
        Self { alpha: alpha.to_bits(), limit: limit.to_bits() }
    }

    /// `α`, the limit, and its negative.
    fn numbers(self) -> (f32, f32, f32) {
        let limit = f32::from_bits(self.limit);
        (f32::from_bits(self.alpha), limit, -limit)
    }
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

/// The gated linear unit of two numbers, and its derivatives in `gate` and in `up`.
#[cube]
pub(super) fn glu(gate: f32, up: f32, #[comptime] gating: Gating) -> (f32, f32, f32) {
    match gating {
        Gating::Silu => {
            let s = sigmoid(gate);
            (gate * s * up, up * s * (1.0 + gate * (1.0 - s)), gate * s)
        }
        Gating::Gelu => {
            let (phi, slope) = normal_gate(gate);
            (gate * phi * up, up * (phi + gate * slope), gate * phi)
        }
        Gating::GeluTanh => {
            let (phi, slope) = tanh_gate(gate);
            (gate * phi * up, up * (phi + gate * slope), gate * phi)
        }
        Gating::Clamped(clamp) => {
            let (alpha, most, least) = comptime![clamp.numbers()];
            let c = min(gate, most);
            let d = max(min(up, most), least) + 1.0;
            let s = sigmoid(c * alpha);
            let of_gate = d * s * (1.0 + c * alpha * (1.0 - s));
            let of_up = c * s;
            (of_up * d, select(gate > most, 0.0, of_gate), select(max(up, -up) > most, 0.0, of_up))
        }
    }
}

#[cube(launch_unchecked)]
pub fn gated_forward<E: Float>(x: &[Vec8<E>], out: &mut [Vec8<E>], half: u32, #[comptime] gating: Gating) {
    let column = CUBE_POS_Y * CUBE_DIM_X + UNIT_POS;
    if column < half {
        let at = (CUBE_POS_X * 2 * half + column) as usize;
        let gate = x[at];
        let up = x[at + half as usize];
        let mut result = Vec8::<E>::empty();
        #[unroll]
        for i in 0..8usize {
            let (y, _, _) = glu(f32::cast_from(gate.extract(i)), f32::cast_from(up.extract(i)), gating);
            result.insert(i, E::cast_from(y));
        }
        out[(CUBE_POS_X * half + column) as usize] = result;
    }
}

#[cube(launch_unchecked)]
pub fn gated_backward<E: Float>(
    x: &[Vec8<E>],
    dout: &[Vec8<E>],
    dx: &mut [Vec8<E>],
    half: u32,
    #[comptime] gating: Gating,
) {
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
            let dy = f32::cast_from(dy.extract(i));
            let (_, of_gate, of_up) = glu(f32::cast_from(gate.extract(i)), f32::cast_from(up.extract(i)), gating);
            gates.insert(i, E::cast_from(dy * of_gate));
            ups.insert(i, E::cast_from(dy * of_up));
        }
        dx[at] = gates;
        dx[at + half as usize] = ups;
    }
}

/// Whether there is a kernel for half rows of this length.
pub fn has_kernel(half: usize) -> bool {
    check("half", half, 8, LONGEST).is_ok()
}

/// `out [rows, half]`, the product of `x [rows, 2 half] = [gate | up]`, of type `E` (2 bytes) and without gaps.
pub fn forward<E: Float>(
    client: &Client,
    x: &Handle,
    out: &Handle,
    rows: usize,
    half: usize,
    gating: Gating,
) -> Result<(), PointwiseError> {
    check("half", half, 8, LONGEST)?;
    let (cube, vectors) = (CubeShape::of(client).fitting(half / 8), rows * half / 8);
    let (x, out) =
        (buffer("x", x, 2 * vectors, 8 * size_of::<E>())?, buffer("out", out, vectors, size_of::<Vec8<E>>())?);
    let (count, half) = (cube.rows(rows, half / 8), half as u32 / 8);
    // SAFETY: every unit stays in its row, and the buffers hold all rows.
    unsafe { gated_forward::launch_unchecked::<E>(client, count, cube.dim(), x, out, half, gating) };
    Ok(())
}

/// The gradient of `x` in [`forward`], given that of `out`.
pub fn backward<E: Float>(
    client: &Client,
    [x, dout, dx]: [&Handle; 3],
    rows: usize,
    half: usize,
    gating: Gating,
) -> Result<(), PointwiseError> {
    check("half", half, 8, LONGEST)?;
    let (cube, vectors) = (CubeShape::of(client).fitting(half / 8), rows * half / 8);
    let (x, dout) = (
        buffer("x", x, 2 * vectors, 8 * size_of::<E>())?,
        buffer("out_gradient", dout, vectors, size_of::<Vec8<E>>())?,
    );
    let dx = buffer("x_gradient", dx, 2 * vectors, 8 * size_of::<E>())?;
    let (count, half) = (cube.rows(rows, half / 8), half as u32 / 8);
    // SAFETY: every unit stays in its row, and the buffers hold all rows.
    unsafe { gated_backward::launch_unchecked::<E>(client, count, cube.dim(), x, dout, dx, half, gating) };
    Ok(())
}
