//! [`few_rows`](super::few_rows()) with `mma.sync.m16n8k16`, for experts with several tokens: the weights are the left
//! operand, eight rows the right one. A sum does not depend on the order of its terms, so a unit reads eight neighbouring
//! numbers of a row with one access and uses them as those columns that the instruction expects of it.
#![allow(missing_docs, reason = "the launch macros write public items without documentation")]

use cubecl::prelude::*;

use super::rows::{rows_of_cube, source};
use super::{FewRows, Rows};
use crate::attention::portable::mma::has_mma;
use crate::attention::portable::mma::tile::{Pair, accumulators, multiply};
use crate::pointwise::{CubeShape, Vec8};

/// Features of a plane.
pub const FEATURES: usize = 16;
/// Rows of an instruction.
const TOKENS: usize = 8;
/// Vectors of a feature that a unit has in flight. Four units share a feature.
const AHEAD: usize = 4;

/// How a cube divides features and rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plan {
    /// The cube.
    pub cube: CubeShape,
    /// Rows that a plane computes at the same time, eights.
    pub tiles: usize,
}

impl Plan {
    pub(super) fn new(sizes: &FewRows, cube: CubeShape) -> Self {
        let is_narrow = sizes.rows <= sizes.groups * TOKENS / 2;
        Self { cube, tiles: if is_narrow { 1 } else { 2 } }
    }
}

/// Whether most groups have rows, and the device has the instruction.
pub(super) fn is_faster<E: Float>(client: &Client, sizes: &FewRows) -> bool {
    let FewRows { rows, groups, features, .. } = *sizes;
    groups > 1 && 2 * rows >= groups && features.is_multiple_of(FEATURES) && has_mma::<E>(client)
}

/// Two neighbours of eight numbers.
#[cube]
fn pair<E: Float>(vector: Vec8<E>, #[comptime] first: usize) -> Pair<E> {
    let mut pair = Pair::<E>::empty();
    pair.insert(0usize, vector.extract(first));
    pair.insert(1usize, vector.extract(comptime![first + 1]));
    pair
}

/// Cube `(features, group)`.
#[cube(launch_unchecked)]
pub fn few_rows_mma<E: Float>(
    x: &[Vec8<E>],
    w: &[Vec8<E>],
    slots: &[i32],
    out: &mut [E],
    width: u32,
    features: u32,
    groups: u32,
    all: u32,
    #[comptime] of: Rows,
    #[comptime] plan: Plan,
) {
    let (group, first, end) = rows_of_cube(slots, groups, all, of, plan.cube);
    let (line, quarter) = (UNIT_POS % 32 / 4, UNIT_POS % 4);
    let plane = CUBE_POS_X * comptime![plan.cube.planes() as u32] + UNIT_POS / 32;
    let feature = plane * comptime![FEATURES as u32];
    if feature < features {
        let upper = (group * features + feature + line) * width;
        let lower = upper + 8 * width;
        let mut row = first;
        while row < end {
            let mut acc = accumulators(comptime![TOKENS * plan.tiles]);
            let mut from = Array::<u32>::new(comptime![plan.tiles]);
            #[unroll]
            for n in 0..plan.tiles {
                // Past the last row, that row is computed again.
                let at = min(row + comptime![(n * TOKENS) as u32] + line, end - 1);
                from[n] = source(slots, groups, at, of) * width;
            }
            let mut column = quarter;
            while column < width {
                let mut uppers = Array::<Vec8<E>>::new(AHEAD);
                let mut lowers = Array::<Vec8<E>>::new(AHEAD);
                let mut rows = Array::<Vec8<E>>::new(comptime![AHEAD * plan.tiles]);
                #[unroll]
                for a in 0..AHEAD {
                    let at = column + comptime![4 * a as u32];
                    uppers[a] = w[(upper + at) as usize];
                    lowers[a] = w[(lower + at) as usize];
                    #[unroll]
                    for n in 0..plan.tiles {
                        rows[comptime![a * plan.tiles + n]] = x[(from[n] + at) as usize];
                    }
                }
                #[unroll]
                for a in 0..AHEAD {
                    #[unroll]
                    for half in 0..2usize {
                        let (early, late) = comptime![(4 * half, 4 * half + 2)];
                        let mut left = Array::<Pair<E>>::new(4usize);
                        left[0] = pair(uppers[a], early);
                        left[1] = pair(lowers[a], early);
                        left[2] = pair(uppers[a], late);
                        left[3] = pair(lowers[a], late);
                        #[unroll]
                        for n in 0..plan.tiles {
                            let vector = rows[comptime![a * plan.tiles + n]];
                            let mut right = Array::<Pair<E>>::new(2usize);
                            right[0] = pair(vector, early);
                            right[1] = pair(vector, late);
                            multiply(acc.index_mut(n), &left, &right);
                        }
                    }
                }
                column += comptime![4 * AHEAD as u32];
            }
            #[unroll]
            for n in 0..plan.tiles {
                #[unroll]
                for half in 0..2usize {
                    let sums = acc.index(n)[half];
                    #[unroll]
                    for i in 0..2usize {
                        let to = row + comptime![(n * TOKENS + i) as u32] + 2 * quarter;
                        if to < end {
                            let at = to * features + feature + line + comptime![8 * half as u32];
                            out[at as usize] = E::cast_from(sums.extract(i));
                        }
                    }
                }
            }
            row += comptime![(TOKENS * plan.tiles) as u32];
        }
    }
}
