//! Kernels of MoE layers besides the grouped GEMMs: the router's top-k, counts and permutation of tokens; gathers and
//! sums of token rows by index; and SwiGLU with the router's probability of each token.
pub mod count;
pub mod offsets;
pub mod permute;
pub mod topk;

use crate::pointwise::cube::plane_total;
use crate::pointwise::swiglu::{gate_gradient, gated, sigmoid};
use crate::pointwise::{CubeShape, MOST, PointwiseError, Vec8, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Longest half row.
const LONGEST: usize = 1 << 24;

/// Sizes of [`sum_rows`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SumRowsShape {
    /// Rows that are read from.
    pub rows: usize,
    /// Length of a row.
    pub columns: usize,
    /// Rows of the result.
    pub out: usize,
    /// Row indices for each of them.
    pub terms: usize,
}

/// Vectors of a unit in flight: of several results if they have few terms.
const LOADS: u32 = 4;
/// Most terms in flight.
const MOST_TERMS: u32 = 8;

/// Results of a unit.
fn results(terms: u32) -> u32 {
    (LOADS / terms).max(1)
}

/// A unit takes a vector of some rows of the result, one below the other.
#[cube(launch_unchecked)]
pub fn add_rows<E: Float, N: Size>(
    x: &[Vector<E, N>],
    index: &[i32],
    out: &mut [Vector<E, N>],
    width: u32,
    rows: u32,
    #[comptime] terms: u32,
) {
    let (results, together) = comptime![(results(terms), terms.min(MOST_TERMS))];
    let at = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    let first = at / width * results;
    let column = at % width;
    if first < rows {
        let mut sums = Array::<Vector<f32, N>>::new(comptime![results as usize]);
        #[unroll]
        for k in 0..comptime![results as usize] {
            sums[k] = Vector::<f32, N>::new(0.0);
        }
        let mut term = 0u32;
        while term < terms {
            let mut source = Array::<i32>::new(comptime![(results * together) as usize]);
            let mut held = Array::<Vector<E, N>>::new(comptime![(results * together) as usize]);
            // All loads are in flight before the first is added: none depends on a condition. Missing terms read row 0.
            #[unroll]
            for k in 0..comptime![(results * together) as usize] {
                let nth = term + comptime![k as u32 % together];
                let row = min(first + comptime![k as u32 / together], rows - 1);
                let number = index[(row * terms + min(nth, comptime![terms - 1])) as usize];
                source[k] = select(nth < terms, number, -1i32);
            }
            #[unroll]
            for k in 0..comptime![(results * together) as usize] {
                held[k] = x[(max(source[k], 0i32) as u32 * width + column) as usize];
            }
            #[unroll]
            for k in 0..comptime![(results * together) as usize] {
                if source[k] >= 0 {
                    let result = comptime![k / together as usize];
                    sums[result] = sums[result] + Vector::<f32, N>::cast_from(held[k]);
                }
            }
            term += together;
        }
        #[unroll]
        for k in 0..comptime![results as usize] {
            let row = first + comptime![k as u32];
            if row < rows {
                out[(row * width + column) as usize] = Vector::<E, N>::cast_from(sums[k]);
            }
        }
    }
}

/// Whether [`sum_rows`] takes these sizes.
pub fn has_sums(shape: SumRowsShape) -> bool {
    let SumRowsShape { rows, columns, out, terms } = shape;
    let most =
        |count: usize, experts_per_rank: usize| count > 0 && experts_per_rank > 0 && count <= MOST / experts_per_rank;
    most(rows, columns) && most(out, columns) && most(out, terms) && rows <= i32::MAX as usize
}

/// Row `i` of `out` is the sum of the rows `index[i, ..]` of `x`, in this order and in fp32; a negative index is
/// skipped. All without gaps, `index` is `i32`. The same bits every time.
///
/// # Errors
/// If a buffer is too short, or there are more than 32 bits count.
pub fn sum_rows<E: Float>(
    client: &Client,
    x: &Handle,
    index: &Handle,
    out: &Handle,
    shape: SumRowsShape,
) -> Result<(), PointwiseError> {
    let SumRowsShape { rows, columns, out: count, terms } = shape;
    if !has_sums(shape) {
        return Err(PointwiseError::Length { what: "a result", found: count * columns, multiple: 1, most: MOST });
    }
    let aligned = |handle: &Handle, bytes: usize| handle.offset_start.unwrap_or(0).is_multiple_of(bytes as u64);
    let fits =
        |n: &usize| columns.is_multiple_of(*n) && aligned(x, n * size_of::<E>()) && aligned(out, n * size_of::<E>());
    let lanes = [8, 4, 2].into_iter().find(fits).unwrap_or(1);
    let (width, bytes) = (columns / lanes, lanes * size_of::<E>());
    let items = count.div_ceil(results(terms as u32) as usize) * width;
    let (x, index) = (buffer("x", x, rows * width, bytes)?, buffer("index", index, count * terms, 4)?);
    let out = buffer("out", out, count * width, bytes)?;
    let cube = CubeShape::of(client);
    // SAFETY: the buffers hold all rows, the indices are of rows as the caller guarantees, and other units do nothing.
    unsafe {
        add_rows::launch_unchecked::<E>(
            client,
            cube.line(items),
            cube.dim(),
            lanes,
            x,
            index,
            out,
            width as u32,
            count as u32,
            terms as u32,
        )
    };
    Ok(())
}

/// Cube `(row, vectors)`.
#[cube(launch_unchecked)]
pub fn weighted_forward<E: Float>(x: &[Vec8<E>], factors: &[f32], out: &mut [Vec8<E>], half: u32) {
    let column = CUBE_POS_Y * CUBE_DIM_X + UNIT_POS;
    if column < half {
        let at = (CUBE_POS_X * 2 * half + column) as usize;
        let gate = x[at];
        let up = x[at + half as usize];
        let factor = factors[CUBE_POS_X as usize];
        let mut result = Vec8::<E>::empty();
        #[unroll]
        for i in 0..8usize {
            let (g, u) = (f32::cast_from(gate.extract(i)), f32::cast_from(up.extract(i)));
            result.insert(i, E::cast_from(gated(g, u) * factor));
        }
        out[(CUBE_POS_X * half + column) as usize] = result;
    }
}

/// Vectors of each tensor in flight for a unit of [`weighted_backward`].
const TOGETHER: u32 = 3;

/// A plane takes a row: no unit waits for those of other planes.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn weighted_backward<E: Float>(
    x: &[Vec8<E>],
    factors: &[f32],
    out_gradient: &[Vec8<E>],
    x_gradient: &mut [Vec8<E>],
    factor_gradients: &mut [f32],
    half: u32,
    rows: u32,
    #[comptime] cube: CubeShape,
) {
    let row = CUBE_POS_X * comptime![cube.planes() as u32] + UNIT_POS / comptime![cube.plane];
    let lane = UNIT_POS % comptime![cube.plane];
    if row < rows {
        let factor = factors[row as usize];
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
                    let (gate, up, dy) = (gates[v], ups[v], dys[v]);
                    let mut of_gate = Vec8::<E>::empty();
                    let mut of_up = Vec8::<E>::empty();
                    #[unroll]
                    for i in 0..8usize {
                        let (g, u) = (f32::cast_from(gate.extract(i)), f32::cast_from(up.extract(i)));
                        let dy = f32::cast_from(dy.extract(i));
                        let s = sigmoid(g);
                        total += dy * (g * s * u);
                        let dy = dy * factor;
                        of_gate.insert(i, E::cast_from(gate_gradient(dy, g, u, s)));
                        of_up.insert(i, E::cast_from(dy * g * s));
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
pub fn has_swiglu(rows: usize, half: usize) -> bool {
    check("half", half, 8, LONGEST).is_ok() && rows > 0 && rows <= MOST / (2 * half / 8)
}

/// `out [rows, half] = silu(gate) up factor` of `x [rows, 2 half] = [gate | up]` of type `E` (2 bytes) and `factors
/// [rows]` of fp32, all without gaps.
///
/// # Errors
/// If a buffer is too short, or half a row no multiple of 8.
pub fn swiglu<E: Float>(
    client: &Client,
    x: &Handle,
    factors: &Handle,
    out: &Handle,
    rows: usize,
    half: usize,
) -> Result<(), PointwiseError> {
    check("half", half, 8, LONGEST)?;
    let (cube, vectors, bytes) = (CubeShape::of(client).fitting(half / 8), rows * half / 8, 8 * size_of::<E>());
    let (x, factors) = (buffer("x", x, 2 * vectors, bytes)?, buffer("factors", factors, rows, 4)?);
    let out = buffer("out", out, vectors, bytes)?;
    // SAFETY: every unit stays in its row, and the buffers hold all rows.
    unsafe {
        weighted_forward::launch_unchecked::<E>(
            client,
            cube.rows(rows, half / 8),
            cube.dim(),
            x,
            factors,
            out,
            half as u32 / 8,
        )
    };
    Ok(())
}

/// The gradients of `x` and of the factors in [`swiglu`], given that of `out`.
pub fn swiglu_gradients<E: Float>(
    client: &Client,
    [x, factors, out_gradient]: [&Handle; 3],
    [x_gradient, factor_gradients]: [&Handle; 2],
    rows: usize,
    half: usize,
) -> Result<(), PointwiseError> {
    check("half", half, 8, LONGEST)?;
    check("rows", rows, 1, MOST)?;
    let (cube, vectors, bytes) = (CubeShape::of(client), rows * half / 8, 8 * size_of::<E>());
    let (x, factors) = (buffer("x", x, 2 * vectors, bytes)?, buffer("factors", factors, rows, 4)?);
    let out_gradient = buffer("out_gradient", out_gradient, vectors, bytes)?;
    let x_gradient = buffer("x_gradient", x_gradient, 2 * vectors, bytes)?;
    let factor_gradients = buffer("factor_gradients", factor_gradients, rows, 4)?;
    // SAFETY: every unit stays in its row, and the buffers hold all rows.
    unsafe {
        weighted_backward::launch_unchecked::<E>(
            client,
            CubeCount::Static((rows as u32).div_ceil(cube.planes() as u32), 1, 1),
            cube.dim(),
            x,
            factors,
            out_gradient,
            x_gradient,
            factor_gradients,
            half as u32 / 8,
            rows as u32,
            cube,
        )
    };
    Ok(())
}
