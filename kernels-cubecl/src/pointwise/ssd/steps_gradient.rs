//! The gradients of step sizes, their biases, rates and skips, from sums of the other kernels.
use super::steps::{Decays, StepInputs, cubes, side};
use super::{CubeShape, Form, PointwiseError, SsdShape, buffer, exp};
use crate::pointwise::partial_sums::sum_partials;
use crate::pointwise::sigmoid::sigmoid;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// A cube takes a chunk of some heads, as in [`chunk_steps`](super::steps::chunk_steps). A block's partial sums of the
/// biases, the rates and the skips are a row of `partials`.
#[cube(launch_unchecked)]
pub fn chunk_steps_gradients<E: Float>(
    raw: &[E],
    bias: &[E],
    a_log: &[E],
    steps: &[f32],
    until: &[f32],
    since: &[f32],
    later: &[f32],
    earlier: &[f32],
    of_taken: &[f32],
    of_before: &[f32],
    of_skip: &[f32],
    along: &[f32],
    raw_gradient: &mut [E],
    partials: &mut [f32],
    seq: u32,
    samples: u32,
    chunks: u32,
    smallest: f32,
    largest: f32,
    numbers: u32,
    blocks: u32,
    #[comptime] row_parts: u32,
    #[comptime] state_parts: u32,
    #[comptime] form: Form,
    #[comptime] cube: CubeShape,
) {
    let (side, chunk, heads) = comptime![(side(cube), form.chunk, form.heads)];
    // The gradient of the sum of logarithms up to a position, or what a position contributes to a head's sums.
    let mut slopes = Shared::<[f32]>::new_slice(comptime![(side * chunk) as usize]);
    // What the last position's sum gets from every other one.
    let mut more = Shared::<[f32]>::new_slice(comptime![(side * chunk) as usize]);
    let mut skips = Shared::<[f32]>::new_slice(comptime![(side * chunk) as usize]);
    let (sample, c) = (CUBE_POS_X / chunks, CUBE_POS_X % chunks);
    let first = CUBE_POS_Y * side;
    let mut item = UNIT_POS;
    while item < comptime![side * chunk] {
        let (head, l) = (first + item / chunk, item % chunk);
        let mut slope = 0.0f32;
        let mut of_last = 0.0f32;
        let mut skip = 0.0f32;
        if head < heads {
            if c * chunk + l < seq {
                let number = (CUBE_POS_X * heads + head) * chunk + l;
                let at = number as usize;
                let mut seen = 0.0f32;
                for part in 0..row_parts {
                    seen += earlier[(part * numbers + number) as usize];
                }
                of_last = steps[at] * until[at] * of_taken[at];
                slope = later[at] - steps[at] * seen + since[at] * of_before[at] - of_last;
                skip = of_skip[at];
            }
        }
        slopes[item as usize] = slope;
        more[item as usize] = of_last;
        skips[item as usize] = skip;
        item += comptime![cube.units];
    }
    sync_cube();
    if UNIT_POS < side {
        let head = first + UNIT_POS;
        if head < heads {
            let mut sum = 0.0f32;
            let mut skip = 0.0f32;
            for l in 0..chunk {
                sum += more[(UNIT_POS * chunk + l) as usize];
                skip += skips[(UNIT_POS * chunk + l) as usize];
            }
            let block = CUBE_POS_X * heads + head;
            let mut state = 0.0f32;
            for part in 0..state_parts {
                state += along[(part * blocks * heads + block) as usize];
            }
            sum += state * since[(block * chunk + comptime![chunk - 1]) as usize];
            // A position's logarithm is in the sums of all positions from it on.
            for l in 0..chunk {
                let at = (UNIT_POS * chunk + comptime![chunk - 1] - l) as usize;
                sum += slopes[at];
                slopes[at] = sum;
            }
            partials[((CUBE_POS_X * 3 + 2) * heads + head) as usize] = skip;
        }
    }
    sync_cube();
    let mut item = UNIT_POS;
    while item < comptime![side * chunk] {
        let (head, l) = (first + item / chunk, item % chunk);
        let t = c * chunk + l;
        let mut of_raw = 0.0f32;
        let mut of_rate = 0.0f32;
        if head < heads {
            if t < seq {
                let number = (CUBE_POS_X * heads + head) * chunk + l;
                let at = number as usize;
                let mut seen = 0.0f32;
                for part in 0..row_parts {
                    seen += earlier[(part * numbers + number) as usize];
                }
                let rate = -exp(f32::cast_from(a_log[head as usize]));
                let slope = slopes[item as usize];
                let of_step = slope * rate + seen + until[at] * of_taken[at];
                of_rate = slope * steps[at] * rate;
                let place = ((t * samples + sample) * heads + head) as usize;
                let x = f32::cast_from(raw[place]) + f32::cast_from(bias[head as usize]);
                // Beyond the limits the step is constant.
                let step = steps[at];
                let free = step > smallest || smallest <= 0.0;
                of_raw = select(free && step < largest, of_step * sigmoid(x), 0.0f32);
                raw_gradient[place] = E::cast_from(of_raw);
            }
        }
        more[item as usize] = of_raw;
        skips[item as usize] = of_rate;
        item += comptime![cube.units];
    }
    sync_cube();
    if UNIT_POS < side {
        let head = first + UNIT_POS;
        if head < heads {
            let mut of_bias = 0.0f32;
            let mut of_rate = 0.0f32;
            for l in 0..chunk {
                of_bias += more[(UNIT_POS * chunk + l) as usize];
                of_rate += skips[(UNIT_POS * chunk + l) as usize];
            }
            partials[(CUBE_POS_X * 3 * heads + head) as usize] = of_bias;
            partials[((CUBE_POS_X * 3 + 1) * heads + head) as usize] = of_rate;
        }
    }
}

/// Sums of the other kernels' backward passes, fp32.
#[derive(Clone, Copy, Debug)]
pub struct Sums<'a> {
    /// See [`weights_gradient`](super::weights_gradient::backward).
    pub later: &'a Handle,
    /// See [`weights_gradient`](super::weights_gradient::backward).
    pub earlier: &'a Handle,
    /// See [`combine`](super::combine::backward): with `taken`, with `before`, with x.
    pub combined: [&'a Handle; 3],
    /// See [`pass`](super::pass::backward).
    pub along: &'a Handle,
}

/// The gradients of the step sizes before their function, `[s, b, h]` of type `E`, and in fp32 `[3, h]` those of their
/// bias, of `a_log`, and of the skips.
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too short.
pub fn backward<E: Float>(
    client: &Client,
    inputs: StepInputs,
    decays: Decays,
    sums: Sums,
    [raw_gradient, head_gradients]: [&Handle; 2],
    shape: SsdShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let (cube, parts, numbers) = (CubeShape::of(client), shape.parts(client), shape.per_head());
    let (blocks, heads) = (shape.samples * shape.chunks(), shape.heads);
    let columns = 3 * heads;
    let partials = client.empty(4 * blocks * columns);
    let [raw, bias, a_log, _] = inputs.buffers::<E>(decays.steps, shape)?;
    let [steps, _, until, since] = decays.buffers(shape)?;
    let number = |name, handle| buffer(name, handle, numbers, 4);
    let [of_taken, of_before, of_skip] = sums.combined;
    // SAFETY: every cube stays in its chunk and heads, and the buffers hold all of them.
    unsafe {
        launch_kernel!(chunk_steps_gradients<E>, client, cubes(cube, shape), cube.dim();
            raw, bias, a_log, steps, until, since, number("later", sums.later)?,
            buffer("earlier", sums.earlier, parts[0] * numbers, 4)?, number("of_taken", of_taken)?,
            number("of_before", of_before)?, number("of_skip", of_skip)?,
            buffer("along", sums.along, parts[1] * blocks * heads, 4)?,
            buffer("raw_gradient", raw_gradient, shape.seq * shape.samples * heads, size_of::<E>())?,
            buffer("parts", &partials, blocks * columns, 4)?;
            shape.seq as u32, shape.samples as u32, shape.chunks() as u32, inputs.limits[0], inputs.limits[1],
            numbers as u32, blocks as u32; parts[0] as u32, parts[1] as u32, shape.form(false), cube)
    };
    sum_partials(client, &partials, head_gradients, blocks, columns)
}
