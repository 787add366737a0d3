//! RMSNorm, `y = w x / √(mean(x²) + eps)`, and LayerNorm, `y = w (x − mean) / √(var + eps) + b`, over rows, and their
//! gradients.
//!
//! The units of a row meet once for it; those of short rows are parts of a plane and need not. In the backward pass
//! cubes stay for many rows: they read the next one while they sum up the one at hand, and write their share of the
//! weights' gradients once. What is added to the residual stream in front
//! of a norm, and the gradients that meet there, can be added on the way.
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

/// The weights of a normalisation, `[columns]` each, which say of which kind it is.
#[derive(Clone, Copy, Debug)]
pub enum Affine<'a> {
    /// RMSNorm with its weight.
    Rms(&'a Handle),
    /// LayerNorm with its weight and bias.
    Layer(&'a Handle, &'a Handle),
}

impl<'a> Affine<'a> {
    fn weight(self) -> &'a Handle {
        let (Self::Rms(w) | Self::Layer(w, _)) = self;
        w
    }

    /// Whether the mean is taken away.
    pub fn centred(self) -> bool {
        matches!(self, Self::Layer(..))
    }

    /// Longest row: what a cube's registers hold in the backward pass.
    fn longest(self) -> usize {
        if self.centred() { 8192 } else { 16384 }
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

/// Rows and their length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormShape {
    /// Rows.
    pub rows: usize,
    /// Numbers in a row.
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

/// This unit's vectors of a row, if it is `present`, to place `slot` of `to`.
#[cube]
#[allow(clippy::too_many_arguments)]
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

/// A row, and with `centred` its first number, to places `slot`, if it is `present`.
#[cube]
#[allow(clippy::too_many_arguments)]
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

/// A row of weights in shared memory, where each unit reads only what it has written. In registers they would stay
/// there unpacked, and the rows would not.
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

/// Every number in `held` moves a place to the front.
#[cube]
fn advance_starts(held: &mut Array<f32>, #[comptime] plan: Plan) {
    #[unroll]
    for i in 0..comptime![plan.ahead] {
        held[i] = held[comptime![i + 1]];
    }
}

/// Every row in `held` moves a place to the front.
#[cube]
fn advance<E: Float>(held: &mut Array<Vec8<E>>, #[comptime] plan: Plan) {
    #[unroll]
    for i in 0..comptime![plan.ahead * plan.vectors] {
        held[i] = held[comptime![i + plan.vectors]];
    }
}
