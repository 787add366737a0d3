//! Queries and keys as vectors of length one, in the order of a GEMM's operand, and their gradients.
use super::{PointwiseError, SsdShape};
use crate::hopper::ptx;
use crate::pointwise::ssd::combine::{head_total, lanes};
use crate::pointwise::{CubeShape, Vec8, buffer, ssd::Form, ssd::arrange::Features};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Added to the squared length of queries and keys, as in transformers and flash-linear-attention.
const LENGTH_EPS: f32 = 1e-6;

/// A key head's position for each `lanes` units, in the order of the operand.
#[cube(launch_unchecked)]
pub fn unit_heads<E: Float>(
    x: &[Vec8<E>],
    out: &mut [Vec8<E>],
    seq: u32,
    samples: u32,
    chunks: u32,
    width: u32,
    first: u32,
    heads: u32,
    scale: f32,
    #[comptime] form: Form,
    #[comptime] lanes: u32,
    #[comptime] cube: CubeShape,
) {
    let (vectors, chunk, groups) = comptime![(form.state / 8, form.chunk, form.groups)];
    let item = CUBE_POS_X * comptime![cube.units / lanes] + UNIT_POS / lanes;
    // Past the last one it is read again: the units of a plane add up together.
    let at = min(item, heads - 1);
    let (of_group, l) = (at / chunk, at % chunk);
    let (block, group) = (of_group / groups, of_group % groups);
    let (sample, t) = (block / chunks, block % chunks * chunk + l);
    let from = (min(t, seq - 1) * samples + sample) * width + first + group * vectors + UNIT_POS % lanes;
    let mut squares = 0.0f32;
    #[unroll]
    for v in 0..comptime![vectors / lanes] {
        let value = x[(from + comptime![v * lanes]) as usize];
        #[unroll]
        for i in 0..8usize {
            let value = f32::cast_from(value.extract(i));
            squares += value * value;
        }
    }
    let factor = scale * ptx::rsqrt(head_total(squares, lanes) + LENGTH_EPS);
    let factor = select(t < seq, factor, 0.0f32);
    if item < heads {
        #[unroll]
        for v in 0..comptime![vectors / lanes] {
            let value = x[(from + comptime![v * lanes]) as usize];
            let mut result = Vec8::<E>::empty();
            #[unroll]
            for i in 0..8usize {
                result.insert(i, E::cast_from(f32::cast_from(value.extract(i)) * factor));
            }
            out[(at * vectors + UNIT_POS % lanes + comptime![v * lanes]) as usize] = result;
        }
    }
}

/// The features `of` of `x [s, b, width]`, each key head divided by its length and times `scale`, as `[b, c, g, l, n]`.
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too short.
pub fn forward<E: Float>(
    client: &Client,
    x: &Handle,
    out: &Handle,
    of: Features,
    scale: f32,
    shape: SsdShape,
) -> Result<(), PointwiseError> {
    shape.check_delta()?;
    let (cube, form, vector) = (CubeShape::of(client), shape.form(false), 8 * size_of::<E>());
    let (lanes, heads) = (lanes(form.state / 8, cube), shape.per_head() / shape.heads * shape.groups);
    // SAFETY: every unit stays in its head's position, and the buffers hold all of them.
    unsafe {
        launch_kernel!(unit_heads<E>, client,
            CubeCount::Static(heads.div_ceil((cube.units / lanes) as usize) as u32, 1, 1), cube.dim();
            buffer("x", x, shape.seq * shape.samples * of.width / 8, vector)?,
            buffer("out", out, heads * shape.state / 8, vector)?;
            shape.seq as u32, shape.samples as u32, shape.chunks() as u32, of.width as u32 / 8, of.first as u32 / 8,
            heads as u32, scale; form, lanes, cube)
    };
    Ok(())
}

/// A key head's position of the sequence for each `lanes` units. With `x` divided by its length as `y`, the gradient is
/// `(g − y ⟨y, g⟩) / length`.
#[cube(launch_unchecked)]
pub fn unit_heads_gradients<E: Float>(
    x: &[Vec8<E>],
    a: &[Vec8<E>],
    b: &[Vec8<E>],
    c: &[Vec8<E>],
    d: &[Vec8<E>],
    x_gradient: &mut [Vec8<E>],
    samples: u32,
    chunks: u32,
    width: u32,
    first: u32,
    heads: u32,
    scale: f32,
    #[comptime] summands: u32,
    #[comptime] form: Form,
    #[comptime] lanes: u32,
    #[comptime] cube: CubeShape,
) {
    let (vectors, chunk, groups) = comptime![(form.state / 8, form.chunk, form.groups)];
    let each = comptime![(vectors / lanes) as usize];
    let item = CUBE_POS_X * comptime![cube.units / lanes] + UNIT_POS / lanes;
    let at = min(item, heads - 1);
    let (place, group) = (at / groups, at % groups);
    let (t, sample) = (place / samples, place % samples);
    let of_group = (sample * chunks + t / chunk) * groups + group;
    let from = (of_group * chunk + t % chunk) * vectors + UNIT_POS % lanes;
    let to = place * width + first + group * vectors + UNIT_POS % lanes;
    let mut sums = Array::<f32>::new(comptime![8 * each]);
    let mut squares = 0.0f32;
    let mut along = 0.0f32;
    #[unroll]
    for v in 0..each {
        let (value, from) =
            (x[to as usize + comptime![v * lanes as usize]], from as usize + comptime![v * lanes as usize]);
        let (left, right) = (a[from], b[from]);
        #[unroll]
        for i in 0..8usize {
            let mut sum = f32::cast_from(left.extract(i)) + f32::cast_from(right.extract(i));
            if comptime![summands > 2] {
                sum += f32::cast_from(c[from].extract(i)) + f32::cast_from(d[from].extract(i));
            }
            let value = f32::cast_from(value.extract(i));
            sums[comptime![v * 8 + i]] = sum;
            squares += value * value;
            along += value * sum;
        }
    }
    let factor = ptx::rsqrt(head_total(squares, lanes) + LENGTH_EPS);
    let along = head_total(along, lanes) * factor * factor;
    if item < heads {
        #[unroll]
        for v in 0..each {
            let to = to as usize + comptime![v * lanes as usize];
            let value = x[to];
            let mut result = Vec8::<E>::empty();
            #[unroll]
            for i in 0..8usize {
                let slope = sums[comptime![v * 8 + i]] - f32::cast_from(value.extract(i)) * along;
                result.insert(i, E::cast_from(slope * factor * scale));
            }
            x_gradient[to] = result;
        }
    }
}

/// The gradient of the features `of`, in `x_gradient [s, b, width]`, from the summands of that of [`forward`]'s result,
/// two or four `[b, c, g, l, n]`.
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too short.
pub fn backward<E: Float>(
    client: &Client,
    x: &Handle,
    summands: &[&Handle],
    x_gradient: &Handle,
    of: Features,
    scale: f32,
    shape: SsdShape,
) -> Result<(), PointwiseError> {
    shape.check_delta()?;
    let (cube, form, vector) = (CubeShape::of(client), shape.form(false), 8 * size_of::<E>());
    let (positions, lanes) = (shape.seq * shape.samples, lanes(form.state / 8, cube));
    let heads = positions * shape.groups;
    let held = shape.per_head() / shape.heads * shape.groups * shape.state / 8;
    let summand = |at: usize| buffer("summands", summands[at.min(summands.len() - 1)], held, vector);
    // SAFETY: every unit stays in its head's position, and the buffers hold all of them.
    unsafe {
        launch_kernel!(unit_heads_gradients<E>, client,
            CubeCount::Static(heads.div_ceil((cube.units / lanes) as usize) as u32, 1, 1), cube.dim();
            buffer("x", x, positions * of.width / 8, vector)?, summand(0)?, summand(1)?, summand(2)?, summand(3)?,
            buffer("x_gradient", x_gradient, positions * of.width / 8, vector)?;
            shape.samples as u32, shape.chunks() as u32, of.width as u32 / 8, of.first as u32 / 8, heads as u32, scale;
            summands.len() as u32, form, lanes, cube)
    };
    Ok(())
}
