//! The activation between the two layers of experts, times the router's probability of each token, and its gradients.
use super::biases::GroupBias;
use crate::pointwise::cube::plane_total;
use crate::pointwise::gated::{Gating, glu};
use crate::pointwise::{CubeShape, MOST, PointwiseError, Vec8, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Longest half row.
const LONGEST: usize = 1 << 24;

/// Eight numbers plus those of a bias, if there is one.
#[cube]
fn with_bias<E: Float>(value: Vec8<E>, bias: &[Vec8<E>], at: usize, #[comptime] biased: bool) -> Array<f32> {
    let mut sums = Array::<f32>::new(8usize);
    #[unroll]
    for i in 0..8usize {
        sums[i] = f32::cast_from(value.extract(i));
    }
    if comptime![biased] {
        let bias = bias[at];
        #[unroll]
        for i in 0..8usize {
            sums[i] = sums[i] + f32::cast_from(bias.extract(i));
        }
    }
    sums
}

/// Start of a row's bias, of `2 half` vectors.
#[cube]
fn bias_of_row(groups: &[i32], row: u32, block: u32, half: u32, #[comptime] biased: bool) -> u32 {
    let mut start = 0u32;
    if comptime![biased] {
        start = groups[(row / block) as usize] as u32 * 2 * half;
    }
    start
}

/// Cube `(row, vectors)`.
#[cube(launch_unchecked)]
pub fn weighted_forward<E: Float>(
    x: &[Vec8<E>],
    bias: &[Vec8<E>],
    groups: &[i32],
    factors: &[f32],
    out: &mut [Vec8<E>],
    half: u32,
    block: u32,
    #[comptime] gating: Gating,
    #[comptime] biased: bool,
) {
    let column = CUBE_POS_Y * CUBE_DIM_X + UNIT_POS;
    if column < half {
        let at = (CUBE_POS_X * 2 * half + column) as usize;
        let gate = x[at];
        let up = x[at + half as usize];
        let factor = factors[CUBE_POS_X as usize];
        let own = (bias_of_row(groups, CUBE_POS_X, block, half, biased) + column) as usize;
        let gate = with_bias::<E>(gate, bias, own, biased);
        let up = with_bias::<E>(up, bias, own + half as usize, biased);
        let mut result = Vec8::<E>::empty();
        #[unroll]
        for i in 0..8usize {
            let (y, _, _) = glu(gate[i], up[i], gating);
            result.insert(i, E::cast_from(y * factor));
        }
        out[(CUBE_POS_X * half + column) as usize] = result;
    }
}

/// Vectors of each tensor in flight for a unit of [`weighted_backward`].
const TOGETHER: u32 = 3;

/// A plane takes a row: no unit waits for those of other planes.
#[cube(launch_unchecked)]
pub fn weighted_backward<E: Float>(
    x: &[Vec8<E>],
    bias: &[Vec8<E>],
    groups: &[i32],
    factors: &[f32],
    out_gradient: &[Vec8<E>],
    x_gradient: &mut [Vec8<E>],
    factor_gradients: &mut [f32],
    half: u32,
    rows: u32,
    block: u32,
    #[comptime] gating: Gating,
    #[comptime] biased: bool,
    #[comptime] cube: CubeShape,
) {
    let row = CUBE_POS_X * comptime![cube.planes() as u32] + UNIT_POS / comptime![cube.plane];
    let lane = UNIT_POS % comptime![cube.plane];
    if row < rows {
        let factor = factors[row as usize];
        let own = bias_of_row(groups, row, block, half, biased);
        let mut total = 0.0f32;
        let mut first = lane;
        while first < half {
            let mut gates = Array::<Vec8<E>>::new(comptime![TOGETHER as usize]);
            let mut ups = Array::<Vec8<E>>::new(comptime![TOGETHER as usize]);
            let mut dys = Array::<Vec8<E>>::new(comptime![TOGETHER as usize]);
            #[unroll]
            for v in 0..comptime![TOGETHER as usize] {
                let column = first + comptime![v as u32 * cube.plane];
                if column < half {
                    let at = (row * 2 * half + column) as usize;
                    gates[v] = x[at];
                    ups[v] = x[at + half as usize];
                    dys[v] = out_gradient[(row * half + column) as usize];
                }
            }
            #[unroll]
            for v in 0..comptime![TOGETHER as usize] {
                let column = first + comptime![v as u32 * cube.plane];
                if column < half {
                    let bias_at = (own + column) as usize;
                    let gate = with_bias::<E>(gates[v], bias, bias_at, biased);
                    let up = with_bias::<E>(ups[v], bias, bias_at + half as usize, biased);
                    let dy = dys[v];
                    let mut of_gate = Vec8::<E>::empty();
                    let mut of_up = Vec8::<E>::empty();
                    #[unroll]
                    for i in 0..8usize {
                        let (y, slope, up_slope) = glu(gate[i], up[i], gating);
                        let dy = f32::cast_from(dy.extract(i));
                        total += dy * y;
                        let dy = dy * factor;
                        of_gate.insert(i, E::cast_from(dy * slope));
                        of_up.insert(i, E::cast_from(dy * up_slope));
                    }
                    let at = (row * 2 * half + column) as usize;
                    x_gradient[at] = of_gate;
                    x_gradient[at + half as usize] = of_up;
                }
            }
            first += comptime![TOGETHER * cube.plane];
        }
        let total = plane_total(total, cube);
        if lane == 0 {
            factor_gradients[row as usize] = total;
        }
    }
}

/// Whether there are kernels for these half rows.
pub fn has_kernel(rows: usize, half: usize) -> bool {
    check("half", half, 8, LONGEST).is_ok() && rows > 0 && rows <= MOST / (2 * half / 8)
}

/// `out [rows, half]`, the product of `x [rows, 2 half] = [gate | up]`, of type `E` (2 bytes), times `factors [rows]` of
/// fp32, all without gaps. The bias of `2 half` columns is added to `x`, without another rounding.
///
/// # Errors
/// If a buffer is too short, or half a row no multiple of 8.
pub fn forward<E: Float>(
    client: &Client,
    [x, factors, out]: [&Handle; 3],
    bias: Option<GroupBias>,
    rows: usize,
    half: usize,
    gating: Gating,
) -> Result<(), PointwiseError> {
    check("half", half, 8, LONGEST)?;
    let (cube, vectors, bytes) = (CubeShape::of(client).fitting(half / 8), rows * half / 8, 8 * size_of::<E>());
    let (values, weights) = (buffer("x", x, 2 * vectors, bytes)?, buffer("factors", factors, rows, 4)?);
    let (bias, groups, block, biased) = GroupBias::args::<E>(bias, [x, factors], rows, 2 * half)?;
    let out = buffer("out", out, vectors, bytes)?;
    // SAFETY: every unit stays in its row, and the buffers hold all rows.
    unsafe {
        launch_kernel!(weighted_forward<E>, client, cube.rows(rows, half / 8), cube.dim();
            values, bias, groups, weights, out; half as u32 / 8, block; gating, biased)
    };
    Ok(())
}

/// The gradients of `x` and of the factors in [`forward`], given that of `out`.
///
/// # Errors
/// As [`forward`].
pub fn backward<E: Float>(
    client: &Client,
    [x, factors, out_gradient]: [&Handle; 3],
    [x_gradient, factor_gradients]: [&Handle; 2],
    bias: Option<GroupBias>,
    rows: usize,
    half: usize,
    gating: Gating,
) -> Result<(), PointwiseError> {
    check("half", half, 8, LONGEST)?;
    check("rows", rows, 1, MOST)?;
    let (cube, vectors, bytes) = (CubeShape::of(client), rows * half / 8, 8 * size_of::<E>());
    let (values, weights) = (buffer("x", x, 2 * vectors, bytes)?, buffer("factors", factors, rows, 4)?);
    let (bias, groups, block, biased) = GroupBias::args::<E>(bias, [x, factors], rows, 2 * half)?;
    let out_gradient = buffer("out_gradient", out_gradient, vectors, bytes)?;
    let x_gradient = buffer("x_gradient", x_gradient, 2 * vectors, bytes)?;
    let factor_gradients = buffer("factor_gradients", factor_gradients, rows, 4)?;
    // SAFETY: every unit stays in its row, and the buffers hold all rows.
    unsafe {
        launch_kernel!(weighted_backward<E>, client,
            CubeCount::Static((rows as u32).div_ceil(cube.planes() as u32), 1, 1), cube.dim();
            values, bias, groups, weights, out_gradient, x_gradient, factor_gradients; half as u32 / 8, rows as u32, block;
            gating, biased, cube)
    };
    Ok(())
}
