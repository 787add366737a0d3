//! One row in the forward pass.
use super::moments::{MomentSet, moments};
use super::{Kind, Plan, Weights, inside, multiplier};
use crate::hopper::ptx::rsqrt;
use crate::pointwise::{F32x4, Vec8};
use cubecl::prelude::*;

/// Adds the row in place `slot` of `others` to that of `values`, and writes the sum.
#[cube]
pub fn add_row<E: Float>(
    values: &mut Array<Vec8<E>>,
    others: &Array<Vec8<E>>,
    #[comptime] slot: usize,
    sum: &mut [Vec8<E>],
    row: u32,
    rows: u32,
    unit: u32,
    width: u32,
    #[comptime] plan: Plan,
) {
    #[unroll]
    for v in 0..comptime![plan.vectors] {
        let column = unit + comptime![v as u32 * plan.units];
        if inside(column, width, plan) {
            let at = comptime![slot * plan.vectors + v];
            let (value, other) = (values[at], others[at]);
            let mut total = Vec8::<E>::empty();
            #[unroll]
            for i in 0..8usize {
                let both = f32::cast_from(value.extract(i)) + f32::cast_from(other.extract(i));
                total.insert(i, E::cast_from(both));
            }
            values[at] = total;
            if row < rows {
                sum[(row * width + column) as usize] = total;
            }
        }
    }
}

/// Takes part in the sums over the row in place `slot` of `values`. Returns the factor for distances from `start`, and
/// what is then subtracted from them.
#[cube]
pub fn scales<E: Float>(
    values: &Array<Vec8<E>>,
    #[comptime] slot: usize,
    weights: &Weights<E>,
    start: f32,
    scratch: &mut Shared<[F32x4]>,
    parity: u32,
    unit: u32,
    width: u32,
    inverse: f32,
    eps: f32,
    #[comptime] kind: Kind,
    #[comptime] plan: Plan,
) -> (f32, f32) {
    let sums = comptime![MomentSet { kind, dys: false }];
    let of_row = moments(values, slot, values, weights, start, scratch, parity, unit, width, inverse, sums, plan);
    let factor = rsqrt(of_row.squares * inverse + eps);
    (factor, of_row.mean * factor)
}

/// A vector of a normalised row; `bias` is ignored unless the kind is `centred`.
#[cube]
pub fn normal<E: Float>(
    value: Vec8<E>,
    weight: Vec8<E>,
    bias: Vec8<E>,
    start: f32,
    factor: f32,
    shift: f32,
    #[comptime] kind: Kind,
) -> Vec8<E> {
    let mut result = Vec8::<E>::empty();
    #[unroll]
    for i in 0..8usize {
        let away = f32::cast_from(value.extract(i)) - start;
        let mut scaled = (away * factor - shift) * multiplier::<E>(weight.extract(i), comptime![kind.plus_one]);
        if comptime![kind.centred] {
            scaled += f32::cast_from(bias.extract(i));
        }
        result.insert(i, E::cast_from(scaled));
    }
    result
}
