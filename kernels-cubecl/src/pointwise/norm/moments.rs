//! The sums over a row that its units need together, at the price of one meeting.
//!
//! A plane takes its sums about its own mean; those about the row's mean follow from them without a loss of digits (Chan,
//! Golub and LeVeque, Algorithms for computing the sample variance, 1983).
use super::{Plan, Weights, inside, place};
use crate::hopper::ptx::named_barrier_sync;
use crate::pointwise::cube::plane_total;
use crate::pointwise::{F32x4, Vec8};
use cubecl::prelude::*;

/// Vectors that a plane leaves for the others: its sums, and in another one how many numbers it has.
const LEFT: usize = 2;

/// What is summed up of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sums {
    /// About the mean instead of zero.
    pub centred: bool,
    /// Also of the gradients times the weights.
    pub slopes: bool,
}

/// Sums over a row, in all its units.
#[derive(CubeType, Clone, Copy)]
pub struct Moments {
    /// The mean if sums are about it, else 0.
    pub mean: f32,
    /// Of squares.
    pub squares: f32,
    /// Of gradients times weights, if sums are about the mean.
    pub weighted: f32,
    /// Of gradients times weights times numbers.
    pub product: f32,
}

/// Shared vectors that [`moments`] uses.
pub fn scratch(plan: Plan) -> usize {
    2 * LEFT * plan.side as usize * plan.shape().planes()
}

/// The sums of the row in the first places of `values` and `slopes`. `inverse` is one over its length. Calls in a row alternate
/// `turn` between 0 and 1, so that units need to meet only once for a call, which all of the cube make.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn moments<E: Float>(
    values: &Array<Vec8<E>>,
    slopes: &Array<Vec8<E>>,
    weights: &Weights<E>,
    scratch: &mut Shared<[F32x4]>,
    turn: u32,
    unit: u32,
    width: u32,
    inverse: f32,
    #[comptime] sums: Sums,
    #[comptime] plan: Plan,
) -> Moments {
    let cube = comptime![plan.shape()];
    let mut mean = 0.0f32;
    let mut weighted = 0.0f32;
    // Numbers of the plane.
    let mut count = comptime![(plan.plane as usize * plan.vectors * 8) as f32].runtime();
    if comptime![sums.centred] {
        let mut sum = 0.0f32;
        let mut own = 0.0f32;
        #[unroll]
        for v in 0..comptime![plan.vectors] {
            if inside(unit + comptime![v as u32 * plan.units], width, plan) {
                let value = values[v];
                #[unroll]
                for i in 0..8usize {
                    sum += f32::cast_from(value.extract(i));
                }
                if comptime![sums.slopes] {
                    let (slope, weight) = (slopes[v], weights[place(comptime![v], plan)]);
                    #[unroll]
                    for i in 0..8usize {
                        weighted += f32::cast_from(slope.extract(i)) * f32::cast_from(weight.extract(i));
                    }
                }
                own += 8.0;
            }
        }
        sum = plane_total(sum, cube);
        if comptime![sums.slopes] {
            weighted = plane_total(weighted, cube);
        }
        if comptime![!plan.whole] {
            count = plane_total(own, cube);
        }
        mean = sum / max(count, 1.0);
    }
    let mut squares = 0.0f32;
    let mut product = 0.0f32;
    #[unroll]
    for v in 0..comptime![plan.vectors] {
        if inside(unit + comptime![v as u32 * plan.units], width, plan) {
            let value = values[v];
            #[unroll]
            for i in 0..8usize {
                let away = f32::cast_from(value.extract(i)) - mean;
                squares += away * away;
            }
            if comptime![sums.slopes] {
                let (slope, weight) = (slopes[v], weights[place(comptime![v], plan)]);
                #[unroll]
                for i in 0..8usize {
                    let away = f32::cast_from(value.extract(i)) - mean;
                    product += away * (f32::cast_from(slope.extract(i)) * f32::cast_from(weight.extract(i)));
                }
            }
        }
    }
    squares = plane_total(squares, cube);
    if comptime![sums.slopes] {
        product = plane_total(product, cube);
    }
    let planes = comptime![cube.planes()];
    if comptime![planes > 1] {
        let line = UNIT_POS / comptime![plan.units];
        let at = (turn * comptime![plan.side] + line) as usize * comptime![LEFT * planes];
        if UNIT_POS % comptime![cube.plane] == 0 {
            let at = at + (unit / comptime![cube.plane]) as usize;
            let mut left = F32x4::empty();
            left.insert(0usize, squares);
            left.insert(1usize, product);
            left.insert(2usize, mean);
            left.insert(3usize, weighted);
            scratch[at] = left;
            if comptime![!plan.whole] {
                scratch[at + planes] = F32x4::new(count);
            }
        }
        meet(line, plan);
        join(scratch, at, count, inverse, sums, plan)
    } else {
        Moments { mean, squares, weighted, product }
    }
}

/// The units of a row meet.
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

/// Joins what the planes left from `at` on. Each has `count` numbers in a whole row.
#[cube]
fn join(
    scratch: &mut Shared<[F32x4]>,
    at: usize,
    count: f32,
    inverse: f32,
    #[comptime] sums: Sums,
    #[comptime] plan: Plan,
) -> Moments {
    let planes = comptime![plan.shape().planes()];
    let mut counts = Array::<f32>::new(planes);
    let mut mean = 0.0f32;
    #[unroll]
    for i in 0..planes {
        counts[i] = count;
        if comptime![!plan.whole] {
            counts[i] = scratch[at + comptime![planes + i]].extract(0usize);
        }
        if comptime![sums.centred] {
            mean += scratch[at + i].extract(2usize) * counts[i];
        }
    }
    mean *= inverse;
    let mut squares = 0.0f32;
    let mut weighted = 0.0f32;
    let mut product = 0.0f32;
    #[unroll]
    for i in 0..planes {
        let left = scratch[at + i];
        squares += left.extract(0usize);
        product += left.extract(1usize);
        if comptime![sums.centred] {
            let apart = left.extract(2usize) - mean;
            squares += counts[i] * apart * apart;
            weighted += left.extract(3usize);
            product += apart * left.extract(3usize);
        }
    }
    Moments { mean, squares, weighted, product }
}
