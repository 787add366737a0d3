//! The sums over a row that all of its units need, for the price of one barrier.
//!
//! Sums about the mean follow from those about the row's first number. The square of that number's distance from the
//! mean is at most the variance times the length of the row, so enough of fp32's digits are left for half precision
//! types even if it is an outlier, and all of them if it is not. Sums about zero would lose the digits of the mean.
use super::{Kind, Plan, Weights, inside, multiplier, place};
use crate::hopper::ptx::named_barrier_sync;
use crate::pointwise::cube::plane_total;
use crate::pointwise::{F32x4, Vec8};
use cubecl::prelude::*;

/// The sums to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MomentSet {
    /// Sums are about the mean of what is centred, else about zero.
    pub kind: Kind,
    /// Also the sums of gradients times weights.
    pub dys: bool,
}

/// Sums over a row, in all its units.
#[derive(CubeType, Clone, Copy)]
pub struct Moments {
    /// The mean minus the row's first number, if sums are about the mean; else 0.
    pub mean: f32,
    /// Sum of squares.
    pub squares: f32,
    /// Sum of gradients times weights, if sums are about the mean.
    pub weighted: f32,
    /// Sum of gradients times weights times numbers.
    pub dot: f32,
}

/// Vectors of shared memory that [`moments`] uses.
pub fn scratch(plan: Plan) -> usize {
    2 * plan.side as usize * plan.shape().planes().max(1)
}

/// The sums of the row in place `slot` of `values` and the first of `dys`, whose first number is `start` (0 if sums
/// are not about the mean). `inverse` is one over its length. Consecutive calls alternate `parity` between 0 and 1, so
/// that a call needs only one barrier; all units of the cube must call it.
#[cube]
pub fn moments<E: Float>(
    values: &Array<Vec8<E>>,
    #[comptime] slot: usize,
    dys: &Array<Vec8<E>>,
    weights: &Weights<E>,
    start: f32,
    scratch: &mut Shared<[F32x4]>,
    parity: u32,
    unit: u32,
    width: u32,
    inverse: f32,
    #[comptime] sums: MomentSet,
    #[comptime] plan: Plan,
) -> Moments {
    let cube = comptime![plan.shape()];
    let mut sum = 0.0f32;
    let mut squares = 0.0f32;
    let mut weighted = 0.0f32;
    let mut dot = 0.0f32;
    #[unroll]
    for v in 0..comptime![plan.vectors] {
        if inside(unit + comptime![v as u32 * plan.units], width, plan) {
            let value = values[comptime![slot * plan.vectors + v]];
            #[unroll]
            for i in 0..8usize {
                let away = f32::cast_from(value.extract(i)) - start;
                squares += away * away;
                if comptime![sums.kind.centred] {
                    sum += away;
                }
            }
            if comptime![sums.dys] {
                let (dy, weight) = (dys[v], weights[place(comptime![v], plan)]);
                #[unroll]
                for i in 0..8usize {
                    let away = f32::cast_from(value.extract(i)) - start;
                    let both = f32::cast_from(dy.extract(i))
                        * multiplier::<E>(weight.extract(i), comptime![sums.kind.plus_one]);
                    dot += away * both;
                    if comptime![sums.kind.centred] {
                        weighted += both;
                    }
                }
            }
        }
    }
    let planes = comptime![cube.planes()];
    if comptime![sums.kind.centred && sums.dys && cube.plane == 32 && planes > 1] {
        let all = four_totals(sum, squares, weighted, dot, parity, plan);
        sum = plane_shuffle(all, 0u32);
        squares = plane_shuffle(all, 1u32);
        weighted = plane_shuffle(all, 2u32);
        dot = plane_shuffle(all, 3u32);
    } else {
        squares = line_total(squares, plan);
        if comptime![sums.dys] {
            dot = line_total(dot, plan);
        }
        if comptime![sums.kind.centred] {
            sum = line_total(sum, plan);
            if comptime![sums.dys] {
                weighted = line_total(weighted, plan);
            }
        }
        if comptime![planes > 1] {
            let line = UNIT_POS / comptime![plan.units];
            let at = (parity * comptime![plan.side] + line) as usize * planes;
            if UNIT_POS % comptime![cube.plane] == 0 {
                let mut left = F32x4::empty();
                left.insert(0usize, sum);
                left.insert(1usize, squares);
                left.insert(2usize, weighted);
                left.insert(3usize, dot);
                scratch[at + (unit / comptime![cube.plane]) as usize] = left;
            }
            meet(line, plan);
            let mut all = scratch[at];
            #[unroll]
            for i in 1..planes {
                all += scratch[at + i];
            }
            sum = all.extract(0usize);
            squares = all.extract(1usize);
            weighted = all.extract(2usize);
            dot = all.extract(3usize);
        }
    }
    let mean = sum * inverse;
    if comptime![sums.kind.centred] {
        squares = max(squares - sum * mean, 0.0);
        dot -= mean * weighted;
    }
    Moments { mean, squares, weighted, dot }
}

/// Four sums over a row's units at once, in planes of 32. A unit gets the one whose index is the last two bits of its
/// position. The units of a plane split the sums among themselves while they add them up, and each takes one of its
/// row's planes' sums: a third of the instructions of four separate sums.
#[cube]
fn four_totals(a: f32, b: f32, c: f32, d: f32, parity: u32, #[comptime] plan: Plan) -> f32 {
    let planes = comptime![plan.shape().planes()];
    let mut totals = Shared::<[f32]>::new_slice(comptime![8 * plan.side as usize * planes]);
    let lane = UNIT_POS % 32;
    let (odd, upper) = (lane % 2 == 1, lane / 2 % 2 == 1);
    let one = select(odd, b, a) + plane_shuffle_xor(select(odd, a, b), 1u32);
    let other = select(odd, d, c) + plane_shuffle_xor(select(odd, c, d), 1u32);
    let mut total = select(upper, other, one) + plane_shuffle_xor(select(upper, one, other), 2u32);
    #[unroll]
    for i in 2..5u32 {
        total += plane_shuffle_xor(total, comptime![1u32 << i]);
    }
    let line = UNIT_POS / comptime![plan.units];
    let at = (parity * comptime![plan.side] + line) * comptime![4 * planes as u32];
    if lane < 4 {
        totals[(at + UNIT_POS % comptime![plan.units] / 32 * 4 + lane) as usize] = total;
    }
    meet(line, plan);
    let mut all = 0.0f32;
    #[unroll]
    for i in 0..comptime![(4 * planes).div_ceil(32) as u32] {
        let slot_of_lane = lane + comptime![32 * i];
        if comptime![32 * (i + 1) <= 4 * planes as u32] || slot_of_lane < comptime![4 * planes as u32] {
            all += totals[(at + slot_of_lane) as usize];
        }
    }
    #[unroll]
    for i in 2..5u32 {
        all += plane_shuffle_xor(all, comptime![1u32 << i]);
    }
    all
}

/// The sum over those of a row's units that are in this plane, in all of them.
#[cube]
fn line_total(value: f32, #[comptime] plan: Plan) -> f32 {
    let mut total = value;
    if comptime![plan.units >= plan.plane] {
        total = plane_total(value, comptime![plan.shape()]);
    } else {
        #[unroll]
        for i in 0..comptime![plan.units.ilog2()] {
            total += plane_shuffle_xor(total, comptime![1u32 << i]);
        }
    }
    total
}

/// Barrier of a row's units.
#[cube]
fn meet(line: u32, #[comptime] plan: Plan) {
    if comptime![plan.side == 1 || plan.plane == 1] {
        sync_cube();
    } else {
        #[unroll]
        for own in 0..comptime![plan.side] {
            if line == own {
                named_barrier_sync(comptime![own + 1], comptime![plan.units]);
            }
        }
    }
}
