//! The kernels. A cube takes a row (token), except in the gradient.

use super::super::cube::{cube_max, cube_sums};
use super::super::{CubeShape, Vec8};
use crate::hopper::ptx;
use cubecl::prelude::*;

const LOG2_E: f32 = core::f32::consts::LOG2_E;
/// Vectors of a unit in flight.
const IN_FLIGHT: usize = 4;

/// This unit's next vectors of the row that begins at `row`, those before `end`.
#[cube]
fn read_in_flight<E: Float>(from: &[Vec8<E>], to: &mut Array<Vec8<E>>, row: u32, column: u32, end: u32) {
    #[unroll]
    for v in 0..IN_FLIGHT {
        let at = column + comptime![v as u32] * CUBE_DIM_X;
        if at < end {
            to[v] = from[(row + at) as usize];
        }
    }
}

/// A cube takes a row; `greatest` is at least −1e30.
#[cube(launch_unchecked)]
pub fn row_maximum<E: Float>(
    logits: &[Vec8<E>],
    greatest: &mut [f32],
    width: u32,
    valid: u32,
    #[comptime] cube: CubeShape,
) {
    let mut scratch = Shared::<[f32]>::new_slice(comptime![cube.scratch()]);
    let mut held = Array::<Vec8<E>>::new(IN_FLIGHT);
    let end = (valid + 7) / 8;
    let mut top = f32::new(-1.0e30);
    let mut column = UNIT_POS;
    while column < end {
        read_in_flight(logits, &mut held, CUBE_POS_X * width, column, end);
        #[unroll]
        for v in 0..IN_FLIGHT {
            let first = (column + comptime![v as u32] * CUBE_DIM_X) * 8;
            let value = held[v];
            #[unroll]
            for i in 0..8usize {
                let is_valid = first + comptime![i as u32] < valid;
                top = max(top, select(is_valid, f32::cast_from(value.extract(i)), -1.0e30));
            }
        }
        column += comptime![IN_FLIGHT as u32] * CUBE_DIM_X;
    }
    let top = cube_max(top, &mut scratch, cube);
    if UNIT_POS == 0 {
        greatest[CUBE_POS_X as usize] = top;
    }
}

/// A cube takes a row: `out = [Σ exp(logit − top), the label's logit − top]`, each for all rows. `top` is in
/// `greatest`; with `find` it is the row's maximum, found in the same pass and written there: a unit rescales its sum
/// when its maximum grows.
#[cube(launch_unchecked)]
pub fn row_sums<E: Float>(
    logits: &[Vec8<E>],
    labels: &[i32],
    greatest: &mut [f32],
    out: &mut [f32],
    width: u32,
    valid: u32,
    first_row: i32,
    #[comptime] find: bool,
    #[comptime] cube: CubeShape,
) {
    let mut scratch = Shared::<[f32]>::new_slice(comptime![cube.scratch()]);
    let row = CUBE_POS_X as usize;
    let first = CUBE_POS_X * width;
    let mut top = f32::new(-1.0e30);
    if comptime![!find] {
        top = greatest[row];
    }
    let mut total = 0.0f32;
    let mut column = UNIT_POS;
    // Whole vectors, several at a time; then those that may contain padding.
    while column + comptime![IN_FLIGHT as u32 - 1] * CUBE_DIM_X < valid / 8 {
        let mut held = Array::<Vec8<E>>::new(IN_FLIGHT);
        read_in_flight(logits, &mut held, first, column, width);
        if comptime![find] {
            let mut next = top;
            #[unroll]
            for v in 0..IN_FLIGHT {
                let value = held[v];
                #[unroll]
                for i in 0..8usize {
                    next = max(next, f32::cast_from(value.extract(i)));
                }
            }
            total *= ptx::exp2((top - next) * LOG2_E);
            top = next;
        }
        #[unroll]
        for v in 0..IN_FLIGHT {
            let value = held[v];
            #[unroll]
            for i in 0..8usize {
                total += ptx::exp2((f32::cast_from(value.extract(i)) - top) * LOG2_E);
            }
        }
        column += comptime![IN_FLIGHT as u32] * CUBE_DIM_X;
    }
    while column < (valid + 7) / 8 {
        let value = logits[(first + column) as usize];
        if comptime![find] {
            let mut next = top;
            #[unroll]
            for i in 0..8usize {
                let is_valid = column * 8 + comptime![i as u32] < valid;
                next = max(next, select(is_valid, f32::cast_from(value.extract(i)), -1.0e30));
            }
            total *= ptx::exp2((top - next) * LOG2_E);
            top = next;
        }
        #[unroll]
        for i in 0..8usize {
            let is_valid = column * 8 + comptime![i as u32] < valid;
            total += select(is_valid, ptx::exp2((f32::cast_from(value.extract(i)) - top) * LOG2_E), 0.0);
        }
        column += CUBE_DIM_X;
    }
    if comptime![find] {
        let all = cube_max(top, &mut scratch, cube);
        total *= ptx::exp2((top - all) * LOG2_E);
        top = all;
    }
    // An id before this rank's columns wraps around to a column past them.
    let own = (labels[row] - first_row) as u32;
    let mut predicted = 0.0f32;
    if UNIT_POS == 0 && own < valid {
        let value = logits[(first + own / 8) as usize];
        #[unroll]
        for i in 0..8usize {
            let shifted = f32::cast_from(value.extract(i)) - top;
            predicted += select(own % 8 == comptime![i as u32], shifted, 0.0);
        }
    }
    // The maximum has used the other half.
    let (total, predicted) = cube_sums(total, predicted, &mut scratch, 1u32, cube);
    if UNIT_POS == 0 {
        if comptime![find] {
            greatest[row] = top;
        }
        out[row] = total;
        out[row + CUBE_COUNT_X as usize] = predicted;
    }
}

/// Cube `(row, vectors)`: `out = (exp(logit − lse) − [label]) dloss`, zero in the padding.
#[cube(launch_unchecked)]
pub fn gradient<E: Float>(
    logits: &[Vec8<E>],
    lse: &[f32],
    labels: &[i32],
    dloss: &[f32],
    out: &mut [Vec8<E>],
    width: u32,
    valid: u32,
    first_row: i32,
) {
    let column = CUBE_POS_Y * CUBE_DIM_X + UNIT_POS;
    if column < width {
        let row = CUBE_POS_X as usize;
        let (lse, dloss) = (lse[row], dloss[row]);
        let own = (labels[row] - first_row) as u32;
        let at = (CUBE_POS_X * width + column) as usize;
        let value = logits[at];
        let mut result = Vec8::<E>::empty();
        #[unroll]
        for i in 0..8usize {
            let column = column * 8 + comptime![i as u32];
            let probability = ptx::exp2((f32::cast_from(value.extract(i)) - lse) * LOG2_E);
            let label = select(column == own, 1.0f32, 0.0f32);
            result.insert(i, E::cast_from(select(column < valid, (probability - label) * dloss, 0.0)));
        }
        out[at] = result;
    }
}
