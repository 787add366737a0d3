//! What mixtures of experts move and weight: sums of rows by number, and SwiGLU with a factor for each row; and which rows go
//! where: the choice of experts, counts, places.
pub mod choose;
pub mod count;
pub mod place;

use crate::pointwise::cube::cube_sums;
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

/// A unit for each vector of the result.
#[cube(launch_unchecked)]
pub fn add_rows<E: Float, N: Size>(
    x: &[Vector<E, N>],
    index: &[i32],
    out: &mut [Vector<E, N>],
    width: u32,
    items: u32,
    terms: u32,
) {
    let at = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if at < items {
        let row = at / width;
        let column = at - row * width;
        let mut sum = Vector::<f32, N>::new(0.0);
        let mut term = 0u32;
        while term < terms {
            let source = index[(row * terms + term) as usize];
            if source >= 0 {
                sum += Vector::<f32, N>::cast_from(x[(source as u32 * width + column) as usize]);
            }
            term += 1;
        }
        out[at as usize] = Vector::<E, N>::cast_from(sum);
    }
}

/// Whether [`sum_rows`] takes these sizes.
pub fn has_sums(shape: RowSums) -> bool {
    let RowSums { rows, columns, out, terms } = shape;
    let most = |count: usize, each: usize| count > 0 && each > 0 && count <= MOST / each;
    most(rows, columns) && most(out, columns) && most(out, terms) && rows <= i32::MAX as usize
}

/// Row `i` of `out` is the sum of the rows `index[i, ..]` of `x`, in this order and in fp32; a negative number is no row. All
/// without gaps, `index` is `i32`. The same bits every time.
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
    let items = count * width;
    let (x, index) = (buffer("x", x, rows * width, bytes)?, buffer("index", index, count * terms, 4)?);
    let out = buffer("out", out, items, bytes)?;
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
            items as u32,
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

/// A cube takes a row.
#[cube(launch_unchecked)]
pub fn weighted_backward<E: Float>(
    x: &[Vec8<E>],
    factors: &[f32],
    out_gradient: &[Vec8<E>],
    x_gradient: &mut [Vec8<E>],
    factor_gradients: &mut [f32],
    half: u32,
    #[comptime] cube: CubeShape,
) {
    let mut scratch = Shared::<[f32]>::new_slice(comptime![cube.scratch()]);
    let factor = factors[CUBE_POS_X as usize];
    let mut total = 0.0f32;
    let mut column = UNIT_POS;
    while column < half {
        let at = (CUBE_POS_X * 2 * half + column) as usize;
        let gate = x[at];
        let up = x[at + half as usize];
        let slope = out_gradient[(CUBE_POS_X * half + column) as usize];
        let mut gates = Vec8::<E>::empty();
        let mut ups = Vec8::<E>::empty();
        #[unroll]
        for i in 0..8usize {
            let (g, u) = (f32::cast_from(gate.extract(i)), f32::cast_from(up.extract(i)));
            let slope = f32::cast_from(slope.extract(i));
            let s = sigmoid(g);
            total += slope * (g * s * u);
            let slope = slope * factor;
            gates.insert(i, E::cast_from(gate_gradient(slope, g, u, s)));
            ups.insert(i, E::cast_from(slope * g * s));
        }
        x_gradient[at] = gates;
        x_gradient[at + half as usize] = ups;
        column += CUBE_DIM_X;
    }
    let (total, _) = cube_sums(total, 0.0, &mut scratch, 0u32, cube);
    if UNIT_POS == 0 {
        factor_gradients[CUBE_POS_X as usize] = total;
    }
}

/// Whether there are kernels for these half rows.
pub fn has_swiglu(rows: usize, half: usize) -> bool {
    check("half", half, 8, LONGEST).is_ok() && rows > 0 && rows <= MOST / (2 * half / 8)
}

/// `out [rows, half] = silu(gate) up factor` of `x [rows, 2 half] = [gate | up]` of type `E` (2 bytes) and `factors [rows]` of
/// fp32, all without gaps.
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
    let (cube, vectors, bytes) = (CubeShape::of(client), rows * half / 8, 8 * size_of::<E>());
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
    // SAFETY: every cube stays in its row, and the buffers hold all rows.
    unsafe {
        weighted_backward::launch_unchecked::<E>(
            client,
            CubeCount::Static(rows as u32, 1, 1),
            cube.dim(),
            x,
            factors,
            out_gradient,
            x_gradient,
            factor_gradients,
            half as u32 / 8,
            cube,
        )
    };
    Ok(())
}
