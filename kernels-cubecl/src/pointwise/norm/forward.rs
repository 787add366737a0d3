//! The normalised rows.
use super::moments::{Sums, moments, scratch};
use super::{
    Affine, NormShape, Plan, Weights, advance, advance_starts, hold_weights, inside, place, read_row, read_start,
};
use crate::hopper::ptx::rsqrt;
use crate::pointwise::{F32x4, PointwiseError, Vec8, buffer};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// A cube takes `side` rows at a time, every so manyth. Without `centred` there is no mean and no `b`; with `adds` the rows
/// are those of `x` and of `other` together, which are also written to `sum`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn norm_forward<E: Float>(
    x: &[Vec8<E>],
    other: &[Vec8<E>],
    w: &[Vec8<E>],
    b: &[Vec8<E>],
    y: &mut [Vec8<E>],
    sum: &mut [Vec8<E>],
    eps: f32,
    inverse: f32,
    rows: u32,
    width: u32,
    #[comptime] centred: bool,
    #[comptime] adds: bool,
    #[comptime] plan: Plan,
) {
    let mut shared = Shared::<[F32x4]>::new_slice(comptime![scratch(plan)]);
    let unit = UNIT_POS % comptime![plan.units];
    let stride = CUBE_COUNT_X * comptime![plan.side];
    let mut row = CUBE_POS_X * comptime![plan.side] + UNIT_POS / comptime![plan.units];
    let mut values = Array::<Vec8<E>>::new(comptime![plan.held()]);
    let mut others = Array::<Vec8<E>>::new(comptime![if adds { plan.held() } else { 1 }]);
    let mut starts = Array::<f32>::new(comptime![plan.ahead + 1]);
    let mut other_starts = Array::<f32>::new(comptime![plan.ahead + 1]);
    #[unroll]
    for k in 0..comptime![plan.ahead + 1] {
        starts[k] = 0.0;
        other_starts[k] = 0.0;
    }
    #[unroll]
    for k in 0..comptime![plan.ahead] {
        let row = row + comptime![k as u32] * stride;
        read_row(x, &mut values, comptime![k], row, rows, unit, width, plan);
        if comptime![centred] {
            read_start(x, &mut starts, comptime![k], row, rows, width);
        }
        if comptime![adds] {
            read_row(other, &mut others, comptime![k], row, rows, unit, width, plan);
            if comptime![centred] {
                read_start(other, &mut other_starts, comptime![k], row, rows, width);
            }
        }
    }
    let mut weights = Weights::<E>::new_slice(comptime![plan.room()]);
    let mut biases = Weights::<E>::new_slice(comptime![if centred { plan.room() } else { 1 }]);
    hold_weights(w, &mut weights, unit, width, plan);
    if comptime![centred] {
        hold_weights(b, &mut biases, unit, width, plan);
    }
    let mut turn = 0u32;
    // As many turns for all rows side by side: their units may meet in each.
    let mut first = CUBE_POS_X * comptime![plan.side];
    while first < rows {
        let next = row + comptime![plan.ahead as u32] * stride;
        read_row(x, &mut values, comptime![plan.ahead], next, rows, unit, width, plan);
        if comptime![centred] {
            read_start(x, &mut starts, comptime![plan.ahead], next, rows, width);
        }
        if comptime![adds] {
            read_row(other, &mut others, comptime![plan.ahead], next, rows, unit, width, plan);
            if comptime![centred] {
                read_start(other, &mut other_starts, comptime![plan.ahead], next, rows, width);
            }
            #[unroll]
            for v in 0..comptime![plan.vectors] {
                let column = unit + comptime![v as u32 * plan.units];
                if inside(column, width, plan) {
                    let (value, other) = (values[v], others[v]);
                    let mut total = Vec8::<E>::empty();
                    #[unroll]
                    for i in 0..8usize {
                        let both = f32::cast_from(value.extract(i)) + f32::cast_from(other.extract(i));
                        total.insert(i, E::cast_from(both));
                    }
                    values[v] = total;
                    if row < rows {
                        sum[(row * width + column) as usize] = total;
                    }
                }
            }
        }
        let sums = comptime![Sums { centred, slopes: false }];
        let start = starts[0usize] + other_starts[0usize];
        let of_row = moments(&values, &values, &weights, start, &mut shared, turn, unit, width, inverse, sums, plan);
        let factor = rsqrt(of_row.squares * inverse + eps);
        let shift = of_row.mean * factor;
        #[unroll]
        for v in 0..comptime![plan.vectors] {
            let column = unit + comptime![v as u32 * plan.units];
            if row < rows && inside(column, width, plan) {
                let (value, weight) = (values[v], weights[place(comptime![v], plan)]);
                let mut result = Vec8::<E>::empty();
                if comptime![centred] {
                    result = biases[place(comptime![v], plan)];
                }
                #[unroll]
                for i in 0..8usize {
                    let away = f32::cast_from(value.extract(i)) - start;
                    let mut scaled = (away * factor - shift) * f32::cast_from(weight.extract(i));
                    if comptime![centred] {
                        scaled += f32::cast_from(result.extract(i));
                    }
                    result.insert(i, E::cast_from(scaled));
                }
                y[(row * width + column) as usize] = result;
            }
        }
        advance(&mut values, plan);
        advance_starts(&mut starts, plan);
        advance_starts(&mut other_starts, plan);
        if comptime![adds] {
            advance(&mut others, plan);
        }
        turn = 1 - turn;
        row += stride;
        first += stride;
    }
}

/// `y [rows, columns]` from `x`, all of type `E` and without gaps; statistics in fp32. With `adds`, an addend and the place
/// of the sum, the rows are those of the sum, after it was rounded to `E`.
///
/// # Errors
/// If there is no kernel for the row length, or a buffer is too short.
pub fn forward<E: Float>(
    client: &Client,
    x: &Handle,
    adds: Option<(&Handle, &Handle)>,
    affine: Affine,
    y: &Handle,
    eps: f32,
    shape: NormShape,
) -> Result<(), PointwiseError> {
    affine.check(shape)?;
    forward_planned::<E>(client, x, adds, affine, y, eps, shape, Plan::of(client, shape.columns, false))
}

/// [`forward`] by a plan that fits the rows.
///
/// # Errors
/// As [`forward`].
#[allow(clippy::too_many_arguments)]
pub fn forward_planned<E: Float>(
    client: &Client,
    x: &Handle,
    adds: Option<(&Handle, &Handle)>,
    affine: Affine,
    y: &Handle,
    eps: f32,
    shape: NormShape,
    plan: Plan,
) -> Result<(), PointwiseError> {
    affine.check(shape)?;
    let NormShape { rows, columns } = shape;
    let (width, vector) = (columns / 8, 8 * size_of::<E>());
    let len = rows * width;
    // What is not there is another buffer, which the kernel does not touch in this place.
    let (other, sum) = adds.unwrap_or((x, y));
    let b = if let Affine::Layer(_, b) = affine { b } else { affine.weight() };
    let (x, other) = (buffer("x", x, len, vector)?, buffer("the addend", other, len, vector)?);
    let (w, b) = (buffer("w", affine.weight(), width, vector)?, buffer("b", b, width, vector)?);
    let (y, sum) = (buffer("y", y, len, vector)?, buffer("the sum", sum, len, vector)?);
    // SAFETY: every unit stays in its row, and the buffers hold all rows.
    unsafe {
        norm_forward::launch_unchecked::<E>(
            client,
            CubeCount::Static(plan.count(shape), 1, 1),
            plan.dim(),
            x,
            other,
            w,
            b,
            y,
            sum,
            eps,
            1.0 / columns as f32,
            rows as u32,
            width as u32,
            affine.centred(),
            adds.is_some(),
            plan,
        )
    };
    Ok(())
}
