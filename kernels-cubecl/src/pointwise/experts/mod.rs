//! What mixtures of experts move and weight: sums of rows by number, and SwiGLU with a factor for each row; and which
//! rows go where: the choice of experts, counts, places.
pub mod choose;
pub mod count;
pub mod order;
pub mod place;

use crate::pointwise::cube::plane_total;
use crate::pointwise::swiglu::{gate_gradient, gated, sigmoid};
use crate::pointwise::{CubeShape, MOST, PointwiseError, Vec8, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Longest half row.
const LONGEST: usize = 1 << 24;

/// Sizes of [`sum_rows`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowSums {
    /// Rows that are read from.
    pub rows: usize,
    /// Numbers in a row.
    pub columns: usize,
    /// Rows that are made.
    pub out: usize,
    /// Row numbers for each of them.
    pub terms: usize,
}

/// Vectors that a unit reads at a time: of several results if they have few terms.
const LOADS: u32 = 4;
/// Most terms that are read at a time.
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
            // All are on their way before the first is added: no load waits for a condition. What is not there reads
            // row 0.
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
pub fn has_sums(shape: RowSums) -> bool {
    let RowSums { rows, columns, out, terms } = shape;
    let most = |count: usize, each: usize| count > 0 && each > 0 && count <= MOST / each;
    most(rows, columns) && most(out, columns) && most(out, terms) && rows <= i32::MAX as usize
}

/// Row `i` of `out` is the sum of the rows `index[i, ..]` of `x`, in this order and in fp32; a negative number is no
/// row. All without gaps, `index` is `i32`. The same bits every time.
///
/// # Errors
/// If a buffer is too short, or there are more than 32 bits count.
pub fn sum_rows<E: Float>(
    client: &Client,
    x: &Handle,
    index: &Handle,
    out: &Handle,
    shape: RowSums,
) -> Result<(), PointwiseError> {
    let RowSums { rows, columns, out: count, terms } = shape;
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
    // SAFETY: the buffers hold all rows, the numbers are of rows as the caller says, and other units do nothing.
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

/// Vectors of each tensor that a unit reads at a time in [`weighted_backward`].
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
            let mut slopes = Array::<Vec8<E>>::new(comptime![TOGETHER as usize]);
            #[unroll]
            for v in 0..comptime![TOGETHER as usize] {
                let column = first + comptime![v as u32 * cube.plane];
                if column < half {
                    let at = (row * 2 * half + column) as usize;
                    gates[v] = x[at];
                    ups[v] = x[at + half as usize];
                    slopes[v] = out_gradient[(row * half + column) as usize];
                }
            }
            #[unroll]
            for v in 0..comptime![TOGETHER as usize] {
                let column = first + comptime![v as u32 * cube.plane];
                if column < half {
                    let (gate, up, slope) = (gates[v], ups[v], slopes[v]);
                    let mut of_gate = Vec8::<E>::empty();
                    let mut of_up = Vec8::<E>::empty();
                    #[unroll]
                    for i in 0..8usize {
                        let (g, u) = (f32::cast_from(gate.extract(i)), f32::cast_from(up.extract(i)));
                        let slope = f32::cast_from(slope.extract(i));
                        let s = sigmoid(g);
                        total += slope * (g * s * u);
                        let slope = slope * factor;
                        of_gate.insert(i, E::cast_from(gate_gradient(slope, g, u, s)));
                        of_up.insert(i, E::cast_from(slope * g * s));
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
///
/// # Errors
/// As [`swiglu`].
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
