//! The layer's output from its summands, and the gradients of x.
use super::{CubeShape, Form, PointwiseError, SsdShape, Vec8, buffer};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Where eight features of position `t` are: by head in units of vectors, by column, and the number of the head.
#[cube]
fn places(t: u32, sample: u32, feature: u32, chunks: u32, #[comptime] form: Form) -> (u32, u32, u32) {
    let (chunk, vectors, serves) = comptime![(form.chunk, form.head_dim / 8, form.serves())];
    let (block, l) = (sample * chunks + t / chunk, t % chunk);
    let (head, v) = (feature / vectors, feature % vectors);
    let number = (block * comptime![form.heads] + head) * chunk + l;
    let group = block * comptime![form.groups] + head / serves;
    let by_column = (group * chunk + l) * comptime![serves * vectors] + head % serves * vectors + v;
    (number * vectors + v, by_column, number)
}

/// A unit for each vector of the output.
#[cube(launch_unchecked)]
pub fn combine_answers<E: Float>(
    inside: &[Vec8<E>],
    before: &[Vec8<E>],
    since: &[f32],
    x: &[Vec8<E>],
    skip: &[E],
    y: &mut [Vec8<E>],
    samples: u32,
    chunks: u32,
    width: u32,
    items: u32,
    #[comptime] form: Form,
    #[comptime] skips: bool,
) {
    let item = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if item < items {
        let line = comptime![form.heads * form.head_dim / 8];
        let (place, feature) = (item / line, item % line);
        let (by_head, by_column, number) = places(place / samples, place % samples, feature, chunks, form);
        let stays = since[number as usize];
        let (inside, before) = (inside[by_head as usize], before[by_column as usize]);
        let mut d = 0.0f32;
        let mut value = Vec8::<E>::new(E::from_int(0));
        if comptime![skips] {
            d = f32::cast_from(skip[(feature / comptime![form.head_dim / 8]) as usize]);
            value = x[(place * width + feature) as usize];
        }
        let mut result = Vec8::<E>::empty();
        #[unroll]
        for i in 0..8usize {
            let answer = f32::cast_from(inside.extract(i)) + stays * f32::cast_from(before.extract(i));
            result.insert(i, E::cast_from(answer + d * f32::cast_from(value.extract(i))));
        }
        y[item as usize] = result;
    }
}

/// `y [s, b, h p]`: the answers `inside` of a position's chunk, by head, those of the state `before` it, by column, times
/// what `since` stays, and of `skipped` `skip [h]` times the first features of `x [s, b, x B C]`. All of type `E` but the
/// fp32 `since`.
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too short.
pub fn forward<E: Float>(
    client: &Client,
    [inside, before]: [&Handle; 2],
    since: &Handle,
    skipped: Option<[&Handle; 2]>,
    y: &Handle,
    shape: SsdShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let (cube, vector, positions) = (CubeShape::of(client), 8 * size_of::<E>(), shape.seq * shape.samples);
    let [x, skip] = match skipped {
        Some([x, skip]) => {
            [buffer("x", x, positions * shape.width() / 8, vector)?, buffer("skip", skip, shape.heads, size_of::<E>())?]
        }
        None => [buffer("x", inside, 1, vector)?, buffer("skip", inside, 1, size_of::<E>())?],
    };
    let (items, held) = (positions * shape.inner() / 8, shape.per_head() * shape.head_dim / 8);
    // SAFETY: every unit stays in its vector, and the buffers hold all of them.
    unsafe {
        launch_kernel!(combine_answers<E>, client, cube.line(items), cube.dim();
            buffer("inside", inside, held, vector)?, buffer("before", before, held, vector)?,
            buffer("since", since, shape.per_head(), 4)?, x, skip, buffer("y", y, items, vector)?;
            shape.samples as u32, shape.chunks() as u32, shape.width() as u32 / 8, items as u32;
            shape.form(false), skipped.is_some())
    };
    Ok(())
}

/// Units of a head of so many vectors: part of a plane, or one where planes are single units.
pub(in crate::pointwise) fn lanes(vectors: u32, cube: CubeShape) -> u32 {
    if cube.plane == 1 { 1 } else { vectors }
}

/// The sum over a head's units, in all of them.
#[cube]
pub(in crate::pointwise) fn head_total(value: f32, #[comptime] lanes: u32) -> f32 {
    let mut total = value;
    #[unroll]
    for i in 0..comptime![lanes.ilog2()] {
        total += plane_shuffle_xor(total, comptime![1u32 << i]);
    }
    total
}

/// A position of a head for each `lanes` units.
#[cube(launch_unchecked)]
pub fn combine_gradients<E: Float>(
    dy: &[Vec8<E>],
    x: &[Vec8<E>],
    before: &[Vec8<E>],
    inside: &[Vec8<E>],
    taken: &[Vec8<E>],
    steps: &[f32],
    until: &[f32],
    skip: &[E],
    x_gradient: &mut [Vec8<E>],
    of_taken: &mut [f32],
    of_before: &mut [f32],
    of_skip: &mut [f32],
    samples: u32,
    chunks: u32,
    width: u32,
    positions: u32,
    #[comptime] form: Form,
    #[comptime] lanes: u32,
    #[comptime] cube: CubeShape,
) {
    let vectors = comptime![form.head_dim / 8];
    let item = CUBE_POS_X * comptime![cube.units / lanes] + UNIT_POS / lanes;
    // Past the last position it is read again: the units of a plane add up together.
    let at = min(item, positions * comptime![form.heads] - 1);
    let (place, head) = (at / comptime![form.heads], at % comptime![form.heads]);
    let d = f32::cast_from(skip[head as usize]);
    let mut sums = Array::<f32>::new(3usize);
    #[unroll]
    for i in 0..3usize {
        sums[i] = 0.0f32;
    }
    let first = head * vectors + UNIT_POS % lanes;
    let (_, _, number) = places(place / samples, place % samples, first, chunks, form);
    let taken_share = steps[number as usize] * until[number as usize];
    #[unroll]
    for v in 0..comptime![vectors / lanes] {
        let feature = first + comptime![v * lanes];
        let (by_head, by_column, _) = places(place / samples, place % samples, feature, chunks, form);
        let slope = dy[(place * comptime![form.heads * vectors] + feature) as usize];
        let value = x[(place * width + feature) as usize];
        let (before, taken) = (before[by_column as usize], taken[by_column as usize]);
        let inside = inside[by_head as usize];
        let mut result = Vec8::<E>::empty();
        #[unroll]
        for i in 0..8usize {
            let (dy, x) = (f32::cast_from(slope.extract(i)), f32::cast_from(value.extract(i)));
            let of_state = f32::cast_from(taken.extract(i));
            sums[0usize] = sums[0usize] + x * of_state;
            sums[1usize] = sums[1usize] + dy * f32::cast_from(before.extract(i));
            sums[2usize] = sums[2usize] + dy * x;
            result.insert(i, E::cast_from(f32::cast_from(inside.extract(i)) + taken_share * of_state + d * dy));
        }
        if item < positions * comptime![form.heads] {
            x_gradient[(place * width + feature) as usize] = result;
        }
    }
    let of_state = head_total(sums[0usize], lanes);
    let of_answer = head_total(sums[1usize], lanes);
    let of_value = head_total(sums[2usize], lanes);
    if UNIT_POS % lanes == 0 {
        of_taken[number as usize] = of_state;
        of_before[number as usize] = of_answer;
        of_skip[number as usize] = of_value;
    }
}

/// What the gradients of x are computed from, of type `E`.
#[derive(Clone, Copy, Debug)]
pub struct CombineInputs<'a> {
    /// The gradient of `y`, `[s, b, h p]`.
    pub dy: &'a Handle,
    /// `[s, b, x B C]`.
    pub x: &'a Handle,
    /// The answers of the states in front of chunks, by column.
    pub before: &'a Handle,
    /// The gradient of x through the positions of its chunk, by head.
    pub inside: &'a Handle,
    /// B times the gradient of what chunks add to the state, by column.
    pub taken: &'a Handle,
    /// `[h]`.
    pub skip: &'a Handle,
}

/// The gradient of x, the first features of `x_gradient [s, b, x B C]`, and sums `[b, c, h, l]` over a head's features:
/// of x with `taken`, of `dy` with `before`, and of `dy` with x. Those of padding are not written.
pub fn backward<E: Float>(
    client: &Client,
    inputs: CombineInputs,
    [steps, until]: [&Handle; 2],
    x_gradient: &Handle,
    [of_taken, of_before, of_skip]: [&Handle; 3],
    shape: SsdShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let (cube, vector, positions) = (CubeShape::of(client), 8 * size_of::<E>(), shape.seq * shape.samples);
    let (held, numbers, all) = (shape.per_head() * shape.head_dim / 8, shape.per_head(), positions * shape.width() / 8);
    let form = shape.form(false);
    let lanes = lanes(form.head_dim / 8, cube);
    let cubes = (positions * shape.heads).div_ceil((cube.units / lanes) as usize) as u32;
    // SAFETY: every unit stays in its head's position, and the buffers hold all of them.
    unsafe {
        launch_kernel!(combine_gradients<E>, client, CubeCount::Static(cubes, 1, 1), cube.dim();
            buffer("dy", inputs.dy, positions * shape.inner() / 8, vector)?, buffer("x", inputs.x, all, vector)?,
            buffer("before", inputs.before, held, vector)?, buffer("inside", inputs.inside, held, vector)?,
            buffer("taken", inputs.taken, held, vector)?, buffer("steps", steps, numbers, 4)?,
            buffer("until", until, numbers, 4)?, buffer("skip", inputs.skip, shape.heads, size_of::<E>())?,
            buffer("x_gradient", x_gradient, all, vector)?, buffer("of_taken", of_taken, numbers, 4)?,
            buffer("of_before", of_before, numbers, 4)?, buffer("of_skip", of_skip, numbers, 4)?;
            shape.samples as u32, shape.chunks() as u32, shape.width() as u32 / 8, positions as u32; form, lanes, cube)
    };
    Ok(())
}
