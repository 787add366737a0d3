//! The kernel: what is left of a row, and the draw.
#![allow(missing_docs, reason = "the launch macros write public items without documentation")]

use cubecl::prelude::*;

use super::search::{Row, last_place, least_at, number_at, place_of, sums_from, weight};
use super::{NEVER, NUMBERS};
use crate::pointwise::{CubeShape, Vec8, cube_max, plane_greatest, plane_total};

/// What is left of a row: the numbers from `all` on, and the first `some` of those from `low` up to `all`, which are equal.
#[derive(CubeType, Clone, Copy)]
struct Left {
    all: f32,
    low: f32,
    some: f32,
    /// The weight of each of those.
    weight: f32,
}

/// The weight of the numbers of a vector that are all left, and how many of the equal ones it has.
#[cube]
fn of_vector<E: Float>(vector: Vec8<E>, row: &Row, left: &Left) -> (f32, f32) {
    let mut total = 0.0f32;
    let mut equal = 0.0f32;
    #[unroll]
    for i in 0..8usize {
        let number = f32::cast_from(vector.extract(i));
        if number >= left.all {
            total += weight(number, row);
        }
        equal += select(number >= left.low && number < left.all, 1.0f32, 0.0f32);
    }
    (total, equal)
}

/// How many of `equal` numbers are left after so many `before` them.
#[cube]
fn left_of(equal: f32, before: f32, left: &Left) -> f32 {
    min(max(left.some - before, 0.0f32), equal)
}

/// The sum over the units of the plane up to this one.
#[cube]
fn sum_up_to_here(value: f32, lane: u32, #[comptime] cube: CubeShape) -> f32 {
    let mut sum = value;
    #[unroll]
    for i in 0..comptime![cube.plane.ilog2()] {
        let distance = comptime![1u32 << i];
        let other = plane_shuffle_up(sum, distance);
        sum += select(lane >= distance, other, 0.0f32);
    }
    sum
}

/// The value of the unit before in the plane, 0 in the first.
#[cube]
fn of_unit_before(value: f32, lane: u32, #[comptime] cube: CubeShape) -> f32 {
    let mut before = 0.0f32;
    if comptime![cube.plane > 1] {
        let other = plane_shuffle_up(value, 1u32);
        before = select(lane > 0, other, 0.0f32);
    }
    before
}

/// The value of the plane's last unit.
#[cube]
fn of_last_unit(value: f32, #[comptime] cube: CubeShape) -> f32 {
    let mut last = value;
    if comptime![cube.plane > 1] {
        last = plane_shuffle(value, comptime![cube.plane - 1]);
    }
    last
}

/// The greatest number of a row, and 1 if one of them is not finite.
#[cube]
pub(super) fn greatest<E: Float>(
    logits: &[Vec8<E>],
    first: u32,
    width: u32,
    of_top: &mut Shared<[f32]>,
    of_broken: &mut Shared<[f32]>,
    #[comptime] cube: CubeShape,
) -> (f32, f32) {
    let mut top = f32::new(-3.0e38);
    let mut broken = 0.0f32;
    let mut column = UNIT_POS;
    while column < width {
        let vector = logits[(first + column) as usize];
        #[unroll]
        for i in 0..8usize {
            let number = f32::cast_from(vector.extract(i));
            // False for no number as well.
            let is_finite = number > f32::new(-3.0e38) && number < f32::new(3.0e38);
            broken = select(is_finite, broken, 1.0f32);
            top = select(number > top, number, top);
        }
        column += CUBE_DIM_X;
    }
    (cube_max(top, of_top, cube), cube_max(broken, of_broken, cube))
}

/// What top-k, top-p and min-p leave, or the greatest number without a temperature.
#[cube]
fn filtered<E: Float>(
    logits: &[Vec8<E>],
    how: &[f32],
    row: &Row,
    scratch: &mut Shared<[f32]>,
    #[comptime] zeros: u32,
    #[comptime] cube: CubeShape,
) -> Left {
    let from = CUBE_POS_X as usize * NUMBERS;
    let (k, p, floor) = (how[from + 1], how[from + 2], row.top + how[from + 3]);
    let mut lowest = place_of(f32::new(-3.0e38), zeros);
    if k > 0.0f32 && k < f32::cast_from(row.width * 8) {
        let (place, _above) = last_place(logits, row, lowest, k, scratch, false, zeros, cube);
        lowest = place;
    }
    let mut all = lowest;
    let mut low = lowest;
    let mut some = 0.0f32;
    if how[from] == 0.0f32 {
        low = place_of(row.top, zeros);
        all = low + 1;
        some = 1.0;
    } else if p < 1.0f32 {
        let least = least_at(lowest, zeros);
        let (total, _same) = sums_from(logits, row, least, least, scratch, true, cube);
        let (place, above) = last_place(logits, row, lowest, p * total, scratch, true, zeros, cube);
        low = place;
        all = place + 1;
        let each = weight(number_at(place, zeros), row);
        some = max(f32::ceil((p * total - above) / each), 1.0f32);
    }
    Left {
        all: max(least_at(all, zeros), floor),
        low: max(least_at(low, zeros), floor),
        some,
        weight: weight(number_at(low, zeros), row),
    }
}

/// A cube draws of a row. Its planes have consecutive parts of it; the one under the point looks for the token.
#[cube(launch_unchecked)]
pub fn draw_rows<E: Float>(
    logits: &[Vec8<E>],
    how: &[f32],
    out: &mut [i32],
    width: u32,
    #[comptime] zeros: u32,
    #[comptime] cube: CubeShape,
) {
    let planes = comptime![cube.planes()];
    let mut of_top = Shared::<[f32]>::new_slice(planes);
    let mut of_broken = Shared::<[f32]>::new_slice(planes);
    let mut scratch = Shared::<[f32]>::new_slice(comptime![cube.scratch()]);
    let first = CUBE_POS_X * width;
    let (top, broken) = greatest(logits, first, width, &mut of_top, &mut of_broken, cube);
    if broken > 0.0f32 || top < f32::new(NEVER / 2.0) {
        if UNIT_POS == 0 {
            out[CUBE_POS_X as usize] = i32::new(-1);
        }
    } else {
        let row = Row { first, width, top, scale: how[CUBE_POS_X as usize * NUMBERS] };
        let left = filtered(logits, how, &row, &mut scratch, zeros, cube);
        let (plane, lane) = (UNIT_POS / comptime![cube.plane], UNIT_POS % comptime![cube.plane]);
        let each = width.div_ceil(comptime![planes as u32]);
        let start = min(plane * each, width);
        let end = min(start + each, width);
        let mut total = 0.0f32;
        let mut equal = 0.0f32;
        let mut column = start + lane;
        while column < end {
            let (weight, ties) = of_vector(logits[(first + column) as usize], &row, &left);
            total += weight;
            equal += ties;
            column += comptime![cube.plane];
        }
        let (total, equal) = (plane_total(total, cube), plane_total(equal, cube));
        if lane == 0 {
            scratch[plane as usize] = total;
            scratch[planes + plane as usize] = equal;
        }
        sync_cube();
        let mut sum = 0.0f32;
        let mut before = 0.0f32;
        #[unroll]
        for i in 0..planes {
            sum += scratch[i] + left_of(scratch[planes + i], before, &left) * left.weight;
            before += scratch[planes + i];
        }
        let point = sum * how[CUBE_POS_X as usize * NUMBERS + 4];
        // The plane under the point, or by rounding the last one that has any weight.
        let mut chosen = 0u32;
        let mut is_under = false;
        let mut sum_before = 0.0f32;
        let mut equal_before = 0.0f32;
        sum = 0.0;
        before = 0.0;
        #[unroll]
        for i in 0..planes {
            let own = scratch[i] + left_of(scratch[planes + i], before, &left) * left.weight;
            if !is_under && own > 0.0f32 {
                chosen = comptime![i as u32].runtime();
                sum_before = sum;
                equal_before = before;
                is_under = point < sum + own;
            }
            sum += own;
            before += scratch[planes + i];
        }
        if plane == chosen {
            let mut last = f32::new(-1.0);
            let mut found = f32::new(-1.0);
            let mut column = start;
            while column < end {
                let mut total = 0.0f32;
                let mut equal = 0.0f32;
                if column + lane < end {
                    let (weight, ties) = of_vector(logits[(first + column + lane) as usize], &row, &left);
                    total = weight;
                    equal = ties;
                }
                let equal_here = sum_up_to_here(equal, lane, cube);
                let of_equal = equal_before + of_unit_before(equal_here, lane, cube);
                total += left_of(equal, of_equal, &left) * left.weight;
                let up_to_here = sum_before + sum_up_to_here(total, lane, cube);
                let mut at = select(lane == 0, sum_before, of_unit_before(up_to_here, lane, cube));
                let is_here = point >= at && point < up_to_here;
                let mut nth = of_equal;
                if total > 0.0f32 {
                    let vector = logits[(first + column + lane) as usize];
                    #[unroll]
                    for i in 0..8usize {
                        let number = f32::cast_from(vector.extract(i));
                        let is_equal = number >= left.low && number < left.all;
                        let is_in = number >= left.all || (is_equal && nth < left.some);
                        let each = weight(number, &row);
                        // One without a weight has no part of the line, whatever rounding says.
                        let is_left = is_in && each > 0.0f32;
                        nth += select(is_equal, 1.0f32, 0.0f32);
                        let token = f32::cast_from((column + lane) * 8 + comptime![i as u32]);
                        if is_left {
                            last = token;
                            found = select(is_here && point >= at, token, found);
                            at += each;
                        }
                    }
                }
                sum_before = of_last_unit(up_to_here, cube);
                equal_before += of_last_unit(equal_here, cube);
                column += comptime![cube.plane];
                if plane_greatest(found, cube) >= 0.0f32 {
                    column = end;
                }
            }
            let found = plane_greatest(found, cube);
            let last = plane_greatest(last, cube);
            if lane == 0 {
                out[CUBE_POS_X as usize] = i32::cast_from(select(found >= 0.0f32, found, last));
            }
        }
    }
}
