//! The forward kernel of RMSNorm and LayerNorm.
use super::moments::scratch;
use super::row::{add_row, normal, scales};
use super::{
    Affine, Kind, NormShape, Plan, Weights, advance, advance_starts, hold_weights, inside, place, read_centred,
    read_row,
};
use crate::pointwise::{F32x4, PointwiseError, Vec8, buffer};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// A cube takes `side` rows at a time, every n-th, or all that it reads at once. Without `centred` there is no mean and
/// no `b`. With `adds` the rows are the sums of `x` and `other`, which are also written to `sum`.
#[cube(launch_unchecked)]
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
    #[comptime] kind: Kind,
    #[comptime] adds: bool,
    #[comptime] plan: Plan,
) {
    let centred = comptime![kind.centred];
    let mut shared = Shared::<[F32x4]>::new_slice(comptime![scratch(plan)]);
    let unit = UNIT_POS % comptime![plan.units];
    let mut values = Array::<Vec8<E>>::new(comptime![plan.held()]);
    let mut added = Array::<Vec8<E>>::new(comptime![if adds { plan.held() } else { 1 }]);
    let mut starts = Array::<f32>::new(comptime![plan.in_flight + 1]);
    let mut added_starts = Array::<f32>::new(comptime![plan.in_flight + 1]);
    #[unroll]
    for k in 0..comptime![plan.in_flight + 1] {
        starts[k] = 0.0;
        added_starts[k] = 0.0;
    }
    if comptime![plan.is_persistent()] {
        let stride = CUBE_COUNT_X * comptime![plan.side];
        let mut row = CUBE_POS_X * comptime![plan.side] + UNIT_POS / comptime![plan.units];
        #[unroll]
        for k in 0..comptime![plan.in_flight] {
            let row = row + comptime![k as u32] * stride;
            let slot = comptime![k];
            let exists = row < rows;
            read_centred(x, &mut values, &mut starts, slot, row, exists, unit, width, centred, plan);
            if comptime![adds] {
                read_centred(other, &mut added, &mut added_starts, slot, row, exists, unit, width, centred, plan);
            }
        }
        let mut weights = Weights::<E>::new_slice(comptime![plan.row_vectors()]);
        let mut biases = Weights::<E>::new_slice(comptime![if centred { plan.row_vectors() } else { 1 }]);
        hold_weights(w, &mut weights, unit, width, plan);
        if comptime![centred] {
            hold_weights(b, &mut biases, unit, width, plan);
        }
        let mut parity = 0u32;
        // Equally many iterations for all rows of the cube: their units may share a barrier in each.
        let mut first = CUBE_POS_X * comptime![plan.side];
        while first < rows {
            let next = row + comptime![plan.in_flight as u32] * stride;
            let last = comptime![plan.in_flight];
            let exists = next < rows;
            read_centred(x, &mut values, &mut starts, last, next, exists, unit, width, centred, plan);
            if comptime![adds] {
                read_centred(other, &mut added, &mut added_starts, last, next, exists, unit, width, centred, plan);
                add_row(&mut values, &added, 0usize, sum, row, rows, unit, width, plan);
            }
            let start = starts[0usize] + added_starts[0usize];
            let (factor, shift) =
                scales(&values, 0usize, &weights, start, &mut shared, parity, unit, width, inverse, eps, kind, plan);
            #[unroll]
            for v in 0..comptime![plan.vectors] {
                let column = unit + comptime![v as u32 * plan.units];
                if row < rows && inside(column, width, plan) {
                    let weight = weights[place(comptime![v], plan)];
                    let mut bias = weight;
                    if comptime![centred] {
                        bias = biases[place(comptime![v], plan)];
                    }
                    let result = normal::<E>(values[v], weight, bias, start, factor, shift, kind);
                    y[(row * width + column) as usize] = result;
                }
            }
            advance(&mut values, plan);
            advance_starts(&mut starts, plan);
            advance_starts(&mut added_starts, plan);
            if comptime![adds] {
                advance(&mut added, plan);
            }
            parity = 1 - parity;
            row += stride;
            first += stride;
        }
    } else {
        let first = CUBE_POS_X * comptime![plan.rows_per_cube()] + UNIT_POS / comptime![plan.units];
        // Past the last row it is read again: no load depends on a condition, and all are in flight before the first
        // sum.
        #[unroll]
        for k in 0..comptime![plan.in_flight + 1] {
            let row = min(first + comptime![k as u32 * plan.side], rows - 1);
            read_centred(x, &mut values, &mut starts, comptime![k], row, true, unit, width, centred, plan);
            if comptime![adds] {
                read_centred(other, &mut added, &mut added_starts, comptime![k], row, true, unit, width, centred, plan);
            }
        }
        // If units share a barrier, they keep the row and the weights in shared memory over it. Otherwise ptxas loads the
        // weights after the barrier, and holds the row unpacked, two registers for one: RMSNorm had 52 registers instead
        // of 32, half as many cubes, and 3.48 instead of 3.86 TB/s on an H200.
        let meets = comptime![plan.units > plan.plane];
        let mut kept =
            Weights::<E>::new_slice(comptime![if meets { plan.row_vectors() * (plan.in_flight + 1) } else { 1 }]);
        let mut weights = Weights::<E>::new_slice(comptime![if meets { plan.row_vectors() } else { 1 }]);
        let mut biases = Weights::<E>::new_slice(comptime![if meets && centred { plan.row_vectors() } else { 1 }]);
        let mut own_weights = Array::<Vec8<E>>::new(comptime![plan.vectors]);
        let mut own_biases = Array::<Vec8<E>>::new(comptime![plan.vectors]);
        if comptime![meets] {
            hold_weights(w, &mut weights, unit, width, plan);
            if comptime![centred] {
                hold_weights(b, &mut biases, unit, width, plan);
            }
        } else {
            read_row(w, &mut own_weights, 0usize, 0u32, true, unit, width, plan);
            if comptime![centred] {
                read_row(b, &mut own_biases, 0usize, 0u32, true, unit, width, plan);
            }
        }
        #[unroll]
        for k in 0..comptime![plan.in_flight + 1] {
            let row = first + comptime![k as u32 * plan.side];
            if comptime![adds] {
                add_row(&mut values, &added, comptime![k], sum, row, rows, unit, width, plan);
            }
            if comptime![meets] {
                #[unroll]
                for v in 0..comptime![plan.vectors] {
                    let slot = comptime![k * plan.vectors + v];
                    kept[place(comptime![slot], plan)] = values[slot];
                }
            }
            let start = starts[k] + added_starts[k];
            let parity = comptime![k as u32 % 2].runtime();
            let (factor, shift) = scales(
                &values,
                comptime![k],
                &weights,
                start,
                &mut shared,
                parity,
                unit,
                width,
                inverse,
                eps,
                kind,
                plan,
            );
            #[unroll]
            for v in 0..comptime![plan.vectors] {
                let column = unit + comptime![v as u32 * plan.units];
                if row < rows && inside(column, width, plan) {
                    let slot = comptime![k * plan.vectors + v];
                    let mut value = values[slot];
                    let mut weight = own_weights[v];
                    let mut bias = own_biases[v];
                    if comptime![meets] {
                        value = kept[place(comptime![slot], plan)];
                        weight = weights[place(comptime![v], plan)];
                        if comptime![centred] {
                            bias = biases[place(comptime![v], plan)];
                        }
                    }
                    let result = normal::<E>(value, weight, bias, start, factor, shift, kind);
                    y[(row * width + column) as usize] = result;
                }
            }
        }
    }
}

/// `y [rows, columns]` from `x`, all of type `E` and without gaps; statistics in fp32. With `adds`, an addend and a
/// buffer for the sum, the rows are those of the sum, after it was rounded to `E`.
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

/// [`forward`] with another plan, which must fit the rows.
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
    let each = if plan.is_persistent() { plan.side } else { plan.rows_per_cube() };
    // A missing tensor is replaced by another buffer, which the kernel does not access in this role.
    let (other, sum) = adds.unwrap_or((x, y));
    let b = if let Affine::Layer(_, b) = affine { b } else { affine.weight() };
    let (x, other) = (buffer("x", x, len, vector)?, buffer("the addend", other, len, vector)?);
    let (w, b) = (buffer("w", affine.weight(), width, vector)?, buffer("b", b, width, vector)?);
    let (y, sum) = (buffer("y", y, len, vector)?, buffer("the sum", sum, len, vector)?);
    // SAFETY: every unit stays in its row, and the buffers hold all rows.
    unsafe {
        launch_kernel!(norm_forward<E>, client, CubeCount::Static(plan.count(shape, each), 1, 1), plan.dim();
            x, other, w, b, y, sum; eps, 1.0 / columns as f32, rows as u32, width as u32;
            affine.kind(), adds.is_some(), plan)
    };
    Ok(())
}
