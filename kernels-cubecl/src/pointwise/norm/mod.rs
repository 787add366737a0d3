//! RMSNorm, `y = w x / √(mean(x²) + eps)`, and LayerNorm, `y = w (x − mean) / √(var + eps) + b`, over rows, and their
//! gradients.
//!
//! The units of a row share one barrier for it; those of short rows are part of a plane and need none. In the backward
//! pass the cubes are persistent: they load the next row while they sum the current one, and write their partial sums
//! of the weights' gradients once. The residual addition before a norm, and the addition of the gradients that meet
//! there, can be fused into the kernels.
pub mod backward;
pub mod forward;
mod moments;
mod plan;
mod row;

use super::{PointwiseError, Vec8, check};
pub use backward::{Gradients, backward, backward_planned};
use cubecl::prelude::*;
use cubecl::server::Handle;
pub use forward::{forward, forward_planned};
pub use plan::Plan;

/// The weights of a norm, `[columns]` each; they determine its kind.
#[derive(Clone, Copy, Debug)]
pub enum Affine<'a> {
    /// RMSNorm with its weight.
    Rms(&'a Handle),
    /// RMSNorm with a weight to which one is added, in fp32: `y = (1 + w) x / √(mean(x²) + eps)` (Gemma).
    RmsPlusOne(&'a Handle),
    /// LayerNorm with its weight and bias.
    Layer(&'a Handle, &'a Handle),
}

impl<'a> Affine<'a> {
    fn weight(self) -> &'a Handle {
        let (Self::Rms(w) | Self::RmsPlusOne(w) | Self::Layer(w, _)) = self;
        w
    }

    /// The kind without the weights.
    pub fn kind(self) -> Kind {
        Kind { centred: matches!(self, Self::Layer(..)), plus_one: matches!(self, Self::RmsPlusOne(_)) }
    }

    /// Longest row that fits into a cube's registers in the backward pass.
    fn longest(self) -> usize {
        if self.kind().centred { 8192 } else { 16384 }
    }

    /// Whether there is a kernel for rows of this length.
    pub fn has_kernel(self, columns: usize) -> bool {
        check("columns", columns, 8, self.longest()).is_ok()
    }

    fn check(self, shape: NormShape) -> Result<(), PointwiseError> {
        check("columns", shape.columns, 8, self.longest())?;
        check("rows", shape.rows, 1, i32::MAX as usize / (shape.columns / 8))
    }
}

/// What distinguishes the kernels of one type of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kind {
    /// Whether the mean is subtracted.
    pub centred: bool,
    /// Whether one is added to the weight.
    pub plus_one: bool,
}

/// A number of the weight as the norm multiplies with it.
#[cube]
pub(super) fn multiplier<E: Float>(weight: E, #[comptime] plus_one: bool) -> f32 {
    let mut weight = f32::cast_from(weight);
    if comptime![plus_one] {
        weight += 1.0;
    }
    weight
}

/// Number and length of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormShape {
    /// Rows.
    pub rows: usize,
    /// Length of a row.
    pub columns: usize,
}

/// Whether a unit's vector is in the row.
#[cube]
fn inside(column: u32, width: u32, #[comptime] plan: Plan) -> bool {
    let mut inside = true;
    if comptime![!plan.whole] {
        inside = column < width;
    }
    inside
}

/// Loads this unit's vectors of a row, if it is `present`, to place `slot` of `to`.
#[cube]
fn read_row<E: Float>(
    from: &[Vec8<E>],
    to: &mut Array<Vec8<E>>,
    #[comptime] slot: usize,
    row: u32,
    present: bool,
    unit: u32,
    width: u32,
    #[comptime] plan: Plan,
) {
    if present {
        #[unroll]
        for v in 0..comptime![plan.vectors] {
            let column = unit + comptime![v as u32 * plan.units];
            if inside(column, width, plan) {
                to[comptime![slot * plan.vectors + v]] = from[(row * width + column) as usize];
            }
        }
    }
}

/// Loads a row, and with `centred` its first number, to places `slot`, if it is `present`.
#[cube]
fn read_centred<E: Float>(
    from: &[Vec8<E>],
    to: &mut Array<Vec8<E>>,
    starts: &mut Array<f32>,
    #[comptime] slot: usize,
    row: u32,
    present: bool,
    unit: u32,
    width: u32,
    #[comptime] centred: bool,
    #[comptime] plan: Plan,
) {
    read_row(from, to, slot, row, present, unit, width, plan);
    if comptime![centred] {
        if present {
            starts[slot] = f32::cast_from(from[(row * width) as usize].extract(0usize));
        }
    }
}

/// A row of weights in shared memory, where each unit reads only what it has written. In registers they would be
/// unpacked, and no registers would be left for the rows.
type Weights<E> = Shared<[Vec8<E>]>;

#[cube]
fn place(#[comptime] v: usize, #[comptime] plan: Plan) -> usize {
    UNIT_POS as usize + comptime![v * (plan.units * plan.side) as usize]
}

#[cube]
fn hold_weights<E: Float>(from: &[Vec8<E>], to: &mut Weights<E>, unit: u32, width: u32, #[comptime] plan: Plan) {
    #[unroll]
    for v in 0..comptime![plan.vectors] {
        let column = unit + comptime![v as u32 * plan.units];
        if inside(column, width, plan) {
            to[place(comptime![v], plan)] = from[column as usize];
        }
    }
}

/// Moves every number in `held` one place to the front.
#[cube]
fn advance_starts(held: &mut Array<f32>, #[comptime] plan: Plan) {
    #[unroll]
    for i in 0..comptime![plan.in_flight] {
        held[i] = held[comptime![i + 1]];
    }
}

/// Moves every row in `held` one place to the front.
#[cube]
fn advance<E: Float>(held: &mut Array<Vec8<E>>, #[comptime] plan: Plan) {
    #[unroll]
    for i in 0..comptime![plan.in_flight * plan.vectors] {
        held[i] = held[comptime![i + plan.vectors]];
    }
}
