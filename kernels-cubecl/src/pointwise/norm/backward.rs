//! The backward kernel of RMSNorm and LayerNorm.
use super::moments::{MomentSet, moments, scratch};
use super::{
    Affine, Kind, NormShape, Plan, Weights, advance, advance_starts, hold_weights, inside, multiplier, place,
    read_centred, read_row,
};
use crate::hopper::ptx::rsqrt;
use crate::pointwise::partial_sums::sum_partials;
use crate::pointwise::{F32x4, PointwiseError, Vec8, buffer};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Half of a vector's sums.
#[cube]
pub(in crate::pointwise) fn half(sums: &mut Array<f32>, #[comptime] first: usize) -> F32x4 {
    let mut half = F32x4::empty();
    #[unroll]
    for i in 0..4usize {
        half.insert(i, sums[comptime![first + i]]);
    }
    half
}

/// Adds up the sums of the cube's rows, one kind after the other, and writes them to `partials` from place `first` on.
#[cube]
fn leave(
    w_sums: &mut Array<f32>,
    b_sums: &mut Array<f32>,
    lines: &mut Shared<[F32x4]>,
    partials: &mut [F32x4],
    first: u32,
    unit: u32,
    width: u32,
    #[comptime] kinds: u32,
    #[comptime] plan: Plan,
) {
    let (side, units) = comptime![(plan.side, plan.units)];
    let halves = comptime![2 * plan.vectors as u32];
    #[unroll]
    for h in 0..comptime![kinds * halves] {
        let from = comptime![(h % halves) as usize * 4];
        let mut own = half(w_sums, from);
        if comptime![h >= halves] {
            own = half(b_sums, from);
        }
        if comptime![side == 1] {
            let column = unit + comptime![h % halves / 2 * units];
            if inside(column, width, plan) {
                partials[(first + (comptime![h / halves] * width + column) * 2 + comptime![h % 2]) as usize] = own;
            }
        } else {
            lines[(UNIT_POS + comptime![h * side * units]) as usize] = own;
        }
    }
    if comptime![side > 1] {
        sync_cube();
        let mut task = UNIT_POS;
        while task < comptime![kinds * halves * units] {
            let (h, unit) = (task / units, task % units);
            let mut total = lines[(h * comptime![side * units] + unit) as usize];
            #[unroll]
            for line in 1..side {
                total += lines[(h * comptime![side * units] + unit + comptime![line * units]) as usize];
            }
            let column = unit + h % halves / 2 * units;
            if inside(column, width, plan) {
                partials[(first + (h / halves * width + column) * 2 + h % 2) as usize] = total;
            }
            task += comptime![side * units];
        }
    }
}

/// A cube takes `side` rows at a time, every n-th, and writes its partial sums of the gradients of `w`, followed by
/// those of `b`, to a row of `partials`. With `adds` the gradients `other` are added to those of `x`.
#[cube(launch_unchecked)]
pub fn norm_backward<E: Float>(
    x: &[Vec8<E>],
    w: &[Vec8<E>],
    y_gradient: &[Vec8<E>],
    other: &[Vec8<E>],
    x_gradient: &mut [Vec8<E>],
    partials: &mut [F32x4],
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
    let stride = CUBE_COUNT_X * comptime![plan.side];
    let line = CUBE_POS_X * comptime![plan.side] + UNIT_POS / comptime![plan.units];
    let mut values = Array::<Vec8<E>>::new(comptime![plan.held()]);
    let mut dys = Array::<Vec8<E>>::new(comptime![plan.held()]);
    let mut others = Array::<Vec8<E>>::new(comptime![if adds { plan.held() } else { 1 }]);
    let mut starts = Array::<f32>::new(comptime![plan.in_flight + 1]);
    #[unroll]
    for k in 0..comptime![plan.in_flight + 1] {
        starts[k] = 0.0;
    }
    #[unroll]
    for k in 0..comptime![plan.in_flight] {
        let row = line + comptime![k as u32] * stride;
        read_centred(x, &mut values, &mut starts, comptime![k], row, row < rows, unit, width, centred, plan);
        read_row(y_gradient, &mut dys, comptime![k], row, row < rows, unit, width, plan);
        if comptime![adds] {
            read_row(other, &mut others, comptime![k], row, row < rows, unit, width, plan);
        }
    }
    let mut weights = Weights::<E>::new_slice(comptime![plan.row_vectors()]);
    hold_weights(w, &mut weights, unit, width, plan);
    let mut w_sums = Array::<f32>::new(comptime![plan.vectors * 8]);
    let mut b_sums = Array::<f32>::new(comptime![plan.vectors * 8]);
    #[unroll]
    for i in 0..comptime![plan.vectors * 8] {
        w_sums[i] = 0.0;
        b_sums[i] = 0.0;
    }
    let mut row = line;
    let mut parity = 0u32;
    // Equally many iterations for all rows of the cube: their units may share a barrier in each.
    let mut first = CUBE_POS_X * comptime![plan.side];
    while first < rows {
        let next = row + comptime![plan.in_flight as u32] * stride;
        let last = comptime![plan.in_flight];
        read_centred(x, &mut values, &mut starts, last, next, next < rows, unit, width, centred, plan);
        read_row(y_gradient, &mut dys, last, next, next < rows, unit, width, plan);
        if comptime![adds] {
            read_row(other, &mut others, last, next, next < rows, unit, width, plan);
        }
        let start = starts[0usize];
        let sums = comptime![MomentSet { kind, dys: true }];
        let of_row =
            moments(&values, 0usize, &dys, &weights, start, &mut shared, parity, unit, width, inverse, sums, plan);
        let factor = rsqrt(of_row.squares * inverse + eps);
        let shift = of_row.mean * factor;
        let along = of_row.dot * factor * factor * inverse;
        let slope_mean = of_row.weighted * inverse * factor;
        #[unroll]
        for v in 0..comptime![plan.vectors] {
            let column = unit + comptime![v as u32 * plan.units];
            if row < rows && inside(column, width, plan) {
                let (value, dy, weight) = (values[v], dys[v], weights[place(comptime![v], plan)]);
                let mut result = Vec8::<E>::empty();
                #[unroll]
                for i in 0..8usize {
                    let k = comptime![v * 8 + i];
                    let normal = (f32::cast_from(value.extract(i)) - start) * factor - shift;
                    let dy = f32::cast_from(dy.extract(i));
                    let weighted = dy * multiplier::<E>(weight.extract(i), comptime![kind.plus_one]);
                    let mut change = weighted * factor;
                    w_sums[k] = w_sums[k] + dy * normal;
                    if comptime![centred] {
                        change -= slope_mean;
                        b_sums[k] = b_sums[k] + dy;
                    }
                    change -= normal * along;
                    let mut rounded = E::cast_from(change);
                    if comptime![adds] {
                        // Rounds like a separate addition.
                        rounded = E::cast_from(f32::cast_from(rounded) + f32::cast_from(others[v].extract(i)));
                    }
                    result.insert(i, rounded);
                }
                x_gradient[(row * width + column) as usize] = result;
            }
        }
        advance(&mut values, plan);
        advance(&mut dys, plan);
        advance_starts(&mut starts, plan);
        if comptime![adds] {
            advance(&mut others, plan);
        }
        parity = 1 - parity;
        row += stride;
        first += stride;
    }
    let kinds = comptime![if centred { 2u32 } else { 1 }];
    let mut lines = Shared::<[F32x4]>::new_slice(comptime![if plan.side > 1 {
        2 * kinds as usize * plan.row_vectors()
    } else {
        1
    }]);
    let first = CUBE_POS_X * kinds * width * 2;
    leave(&mut w_sums, &mut b_sums, &mut lines, partials, first, unit, width, kinds, plan);
}

/// The outputs of [`backward`].
#[derive(Clone, Copy, Debug)]
pub struct Gradients<'a> {
    /// The gradient of `x`, of its type.
    pub x: &'a Handle,
    /// The gradient of the weight, followed by that of the bias: fp32 `[columns]` or `[2, columns]`.
    pub affine: &'a Handle,
}

/// The gradients of `x` (type `E`) and of the weights (fp32) in [`forward`](super::forward), given that of `y`. `adds`,
/// of the size of `x`, is added to the gradient of `x`, rounded like a separate addition. Deterministic.
pub fn backward<E: Float>(
    client: &Client,
    x: &Handle,
    affine: Affine,
    y_gradient: &Handle,
    adds: Option<&Handle>,
    targets: Gradients,
    eps: f32,
    shape: NormShape,
) -> Result<(), PointwiseError> {
    affine.check(shape)?;
    let plan = Plan::of(client, shape.columns, true);
    backward_planned::<E>(client, x, affine, y_gradient, adds, targets, eps, shape, plan)
}

/// [`backward`] with another plan, which must fit the rows.
pub fn backward_planned<E: Float>(
    client: &Client,
    x: &Handle,
    affine: Affine,
    y_gradient: &Handle,
    adds: Option<&Handle>,
    targets: Gradients,
    eps: f32,
    shape: NormShape,
    plan: Plan,
) -> Result<(), PointwiseError> {
    affine.check(shape)?;
    let NormShape { rows, columns } = shape;
    let (width, vector) = (columns / 8, 8 * size_of::<E>());
    let (len, sums) = (rows * width, if affine.kind().centred { 2 * columns } else { columns });
    let count = plan.count(shape, plan.side);
    let shares = count as usize;
    let partials = client.empty(4 * shares * sums);
    // A missing tensor is replaced by another buffer, which the kernel does not access in this role.
    let other = buffer("the addend", adds.unwrap_or(x), len, vector)?;
    let (x, w) = (buffer("x", x, len, vector)?, buffer("w", affine.weight(), width, vector)?);
    let y_gradient = buffer("y_gradient", y_gradient, len, vector)?;
    let x_gradient = buffer("x_gradient", targets.x, len, vector)?;
    let written = buffer("parts", &partials, shares * sums / 4, 16)?;
    buffer("affine_gradient", targets.affine, sums, 4)?;
    // SAFETY: every unit stays in its row and its row of partial sums, and the buffers hold all rows.
    unsafe {
        launch_kernel!(norm_backward<E>, client, CubeCount::Static(count, 1, 1), plan.dim();
            x, w, y_gradient, other, x_gradient, written; eps, 1.0 / columns as f32, rows as u32, width as u32;
            affine.kind(), adds.is_some(), plan)
    };
    sum_partials(client, &partials, targets.affine, shares, sums)
}
