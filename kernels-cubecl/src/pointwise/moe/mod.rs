//! Kernels of MoE layers besides the grouped GEMMs: the router's top-k, counts and permutation of tokens; gathers and
//! sums of token rows by index; the activation with the router's probability of each token; and biases of experts.
pub mod biases;
pub mod count;
pub mod offsets;
pub mod permute;
pub mod topk;
pub mod weighted;

use crate::pointwise::{CubeShape, MOST, PointwiseError, buffer};
use cubecl::prelude::*;
use cubecl::server::Handle;

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
        launch_kernel!(add_rows<E>, client, cube.line(items), cube.dim(), lanes;
            x, index, out; width as u32, count as u32; terms as u32)
    };
    Ok(())
}
