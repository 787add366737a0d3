//! How likely a token is, and which are likeliest.
#![allow(missing_docs, reason = "the launch macros write public items without documentation")]

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::super::LONGEST;
use super::OWN;
use super::kernel::greatest;
use super::search::{Row, weight};
use crate::pointwise::{CubeShape, PointwiseError, Vec8, buffer, check, cube_max, cube_sums};

/// A cube has a row. It looks for the likeliest tokens one after the other: each is the greatest of those that come behind the
/// last in their order, the first of equal ones first.
#[cube(launch_unchecked)]
pub fn row_likelihoods<E: Float>(
    logits: &[Vec8<E>],
    drawn: &[i32],
    asked: &[i32],
    out: &mut [f32],
    width: u32,
    stride: u32,
    #[comptime] cube: CubeShape,
) {
    let planes = comptime![cube.planes()];
    let mut of_top = Shared::<[f32]>::new_slice(planes);
    let mut of_column = Shared::<[f32]>::new_slice(planes);
    let mut scratch = Shared::<[f32]>::new_slice(comptime![cube.scratch()]);
    let (known, count) = (asked[2 * CUBE_POS_X as usize], asked[2 * CUBE_POS_X as usize + 1]);
    let token = select(known < 0, drawn[CUBE_POS_X as usize], known);
    if token >= 0 && count >= 0 {
        let (first, at) = (CUBE_POS_X * width, (CUBE_POS_X * stride) as usize);
        let (top, _broken) = greatest(logits, first, width, &mut of_top, &mut of_column, cube);
        let row = Row { first, width, top, scale: f32::new(std::f64::consts::LOG2_E) };
        let mut total = 0.0f32;
        let mut column = UNIT_POS;
        while column < width {
            let vector = logits[(first + column) as usize];
            #[unroll]
            for i in 0..8usize {
                total += weight(f32::cast_from(vector.extract(i)), &row);
            }
            column += CUBE_DIM_X;
        }
        let (total, _none) = cube_sums(total, 0.0f32, &mut scratch, 0u32, cube);
        if UNIT_POS == 0 {
            let vector = logits[(first + token as u32 / 8) as usize];
            let mut own = 0.0f32;
            #[unroll]
            for i in 0..8usize {
                own = select(token as u32 % 8 == comptime![i as u32], f32::cast_from(vector.extract(i)), own);
            }
            out[at] = top;
            out[at + 1] = total;
            out[at + 2] = own;
        }
        let mut above = f32::new(3.0e38);
        let mut before = f32::new(-1.0);
        let mut nth = 0;
        while nth < count {
            let mut best = f32::new(-3.0e38);
            let mut place = f32::new(0.0);
            let mut column = UNIT_POS;
            while column < width {
                let vector = logits[(first + column) as usize];
                #[unroll]
                for i in 0..8usize {
                    let number = f32::cast_from(vector.extract(i));
                    let token = f32::cast_from(column * 8 + comptime![i as u32]);
                    let is_behind = number < above || (number == above && token > before);
                    let is_better = is_behind && number > best;
                    place = select(is_better, token, place);
                    best = select(is_better, number, best);
                }
                column += CUBE_DIM_X;
            }
            above = cube_max(best, &mut of_top, cube);
            let candidate = select(best == above, -place, f32::new(-3.0e38));
            before = -cube_max(candidate, &mut of_column, cube);
            if UNIT_POS == 0 {
                let to = at + OWN + 2 * nth as usize;
                out[to] = before;
                out[to + 1] = above;
            }
            // The next one writes there.
            sync_cube();
            nth += 1;
        }
    }
}

/// For each row of `logits [rows, columns]`, of which `asked [rows, 2]`, i32, has a token, or −1 for that in `drawn [rows]`,
/// and a number of likeliest tokens up to `most`: the first [`OWN`] and as many pairs of `out [rows, OWN + 2 most]`, fp32.
/// They are the greatest logit, the sum over all of e to the power of how much they are less, the token's logit; and of the
/// likeliest tokens, likeliest first, the token and its logit. A row whose token or number is negative is left out. Where a
/// logit is no number or +∞, the sum is no number.
///
/// # Errors
/// If there is no kernel for these sizes, or a buffer is too small.
pub fn likelihoods<E: Float>(
    client: &Client,
    [rows, columns, most]: [usize; 3],
    [logits, drawn, asked, out]: [&Handle; 4],
) -> Result<(), PointwiseError> {
    check("columns", columns, 8, LONGEST)?;
    check("rows", rows, 1, i32::MAX as usize / (columns / 8))?;
    check("likeliest", most.max(1), 1, columns)?;
    let (width, stride) = (columns / 8, OWN + 2 * most);
    let logits = buffer("logits", logits, rows * width, 8 * size_of::<E>())?;
    let (drawn, asked) = (buffer("drawn", drawn, rows, 4)?, buffer("what is asked", asked, 2 * rows, 4)?);
    let out = buffer("out", out, rows * stride, 4)?;
    let cube = CubeShape::of(client).wide();
    // SAFETY: every cube stays in its row, and the buffers hold all rows. Tokens are columns.
    unsafe {
        launch_kernel!(row_likelihoods<E>, client, CubeCount::Static(rows as u32, 1, 1), cube.dim();
            logits, drawn, asked, out; width as u32, stride as u32; cube)
    };
    Ok(())
}
