//! Rows of tokens to the experts that use them: each is read once, however many copies it has.
use super::LOADS;
use crate::pointwise::{CubeShape, MOST, PointwiseError, Vec8, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Rows that a cube looks through for those that are no copies.
const LOOKED: usize = 64;

/// Sizes of [`spread_rows`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowCopies {
    /// Rows that are read.
    pub rows: usize,
    /// Numbers in a row, a multiple of 8.
    pub columns: usize,
    /// Rows that are made.
    pub out: usize,
    /// Most copies of a row.
    pub terms: usize,
}

impl RowCopies {
    fn check(&self) -> Result<(), PointwiseError> {
        let Self { rows, columns, out, terms } = *self;
        check("columns", columns, 8, MOST)?;
        check("rows", rows, 1, MOST / columns.max(terms))?;
        check("copies", out, 1, MOST / columns)?;
        check("copies of a row", terms, 1, MOST)
    }

    /// Whether [`spread_rows`] takes these sizes.
    pub fn has_kernel(&self) -> bool {
        self.check().is_ok()
    }
}

/// Rows of a unit.
fn rows_of(terms: u32) -> u32 {
    (LOADS / terms).max(1)
}

/// A unit takes a vector of some rows, one below the other. Behind the cubes of these stand those that look for rows of `out` that
/// are no copies, and make them zeros.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn copy_rows<E: Float>(
    x: &[Vec8<E>],
    to: &[i32],
    from: &[i32],
    out: &mut [Vec8<E>],
    width: u32,
    rows: u32,
    out_rows: u32,
    copying: u32,
    #[comptime] terms: u32,
    #[comptime] looked: u32,
) {
    if CUBE_POS_X < copying {
        let own = comptime![rows_of(terms)];
        let at = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
        let first = at / width * own;
        let column = at % width;
        if first < rows {
            let mut held = Array::<Vec8<E>>::new(comptime![own as usize]);
            // All are on their way before the first is written; behind the last row it is copied again.
            #[unroll]
            for k in 0..own {
                held[comptime![k as usize]] = x[(min(first + comptime![k], rows - 1) * width + column) as usize];
            }
            #[unroll]
            for k in 0..own {
                let numbers = min(first + comptime![k], rows - 1) * terms;
                let mut nth = 0u32;
                while nth < terms {
                    let row = to[(numbers + nth) as usize];
                    if row >= 0 {
                        out[(row as u32 * width + column) as usize] = held[comptime![k as usize]];
                    }
                    nth += 1;
                }
            }
        }
    } else {
        let first = (CUBE_POS_X - copying) * looked;
        let mut sources = Shared::<[i32]>::new_slice(comptime![looked as usize]);
        let mut at = UNIT_POS;
        while at < looked {
            sources[at as usize] = from[min(first + at, out_rows - 1) as usize];
            at += CUBE_DIM_X;
        }
        sync_cube();
        let mut row = first;
        while row < min(first + looked, out_rows) {
            if sources[(row - first) as usize] < 0 {
                let mut column = UNIT_POS;
                while column < width {
                    out[(row * width + column) as usize] = Vec8::<E>::new(E::new(0.0));
                    column += CUBE_DIM_X;
                }
            }
            row += 1;
        }
    }
}

/// Row `to[i, ..]` of `out` is row `i` of `x`, where `to [rows, terms]` is not negative, and row `j` is zeros where
/// `from [out]` is negative: the two tables are each other's transposes (`i32`). All without gaps, numbers of 2 bytes. Gives what
/// [`sum_rows`](super::sum_rows) by `from` does.
///
/// # Errors
/// If a buffer is too short, or there is no kernel for the sizes.
pub fn spread_rows<E: Float>(
    client: &Client,
    x: &Handle,
    [to, from]: [&Handle; 2],
    out: &Handle,
    shape: RowCopies,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let RowCopies { rows, columns, out: count, terms } = shape;
    let (width, bytes) = (columns / 8, 8 * size_of::<E>());
    let cube = CubeShape::of(client);
    let items = rows.div_ceil(rows_of(terms as u32) as usize) * width;
    let (copying, looking) = (items.div_ceil(cube.units as usize), count.div_ceil(LOOKED));
    let (x, out) = (buffer("x", x, rows * width, bytes)?, buffer("out", out, count * width, bytes)?);
    let (to, from) = (buffer("copies of rows", to, rows * terms, 4)?, buffer("rows of copies", from, count, 4)?);
    // SAFETY: the buffers hold all rows, and the numbers are of rows as the caller says.
    unsafe {
        copy_rows::launch_unchecked::<E>(
            client,
            CubeCount::Static((copying + looking) as u32, 1, 1),
            cube.dim(),
            x,
            to,
            from,
            out,
            width as u32,
            rows as u32,
            count as u32,
            copying as u32,
            terms as u32,
            LOOKED as u32,
        )
    };
    Ok(())
}
