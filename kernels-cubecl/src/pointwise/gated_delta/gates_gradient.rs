//! The gradients of what β and the decays are computed from, and of the parameters of heads.
use super::{PointwiseError, SsdShape};
use crate::pointwise::ssd::steps::{Decays, StepInputs, cubes, side};
use crate::pointwise::ssd::{Form, exp};
use crate::pointwise::{CubeShape, buffer, partial_sums::sum_partials, sigmoid::sigmoid};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// A cube takes a chunk of some heads, as in [`chunk_steps`](crate::pointwise::ssd::steps::chunk_steps). A block's partial
/// sums of the biases and the rates are a row of `partials`.
#[cube(launch_unchecked)]
pub fn chunk_gates_gradients<E: Float>(
    raw: &[E],
    bias: &[E],
    a_log: &[E],
    raw_beta: &[E],
    steps: &[f32],
    until: &[f32],
    since: &[f32],
    of_beta: &[f32],
    of_sums: &[f32],
    of_until: &[f32],
    of_since: &[f32],
    along: &[f32],
    raw_gradient: &mut [E],
    beta_gradient: &mut [E],
    partials: &mut [f32],
    seq: u32,
    samples: u32,
    chunks: u32,
    blocks: u32,
    #[comptime] parts: u32,
    #[comptime] form: Form,
    #[comptime] cube: CubeShape,
) {
    let (side, chunk, heads) = comptime![(side(cube), form.chunk, form.heads)];
    // The gradient of the sum of logarithms up to a position, or what a position contributes to the rate of its head.
    let mut slopes = Shared::<[f32]>::new_slice(comptime![(side * chunk) as usize]);
    // What the sum up to the last position gets from every other one, or what a position contributes to the bias.
    let mut more = Shared::<[f32]>::new_slice(comptime![(side * chunk) as usize]);
    let (sample, c) = (CUBE_POS_X / chunks, CUBE_POS_X % chunks);
    let first = CUBE_POS_Y * side;
    let mut item = UNIT_POS;
    while item < comptime![side * chunk] {
        let (head, l) = (first + item / chunk, item % chunk);
        let mut slope = 0.0f32;
        let mut of_last = 0.0f32;
        if head < heads {
            let at = ((CUBE_POS_X * heads + head) * chunk + l) as usize;
            of_last = until[at] * of_until[at];
            slope = of_sums[at] + since[at] * of_since[at] - of_last;
        }
        slopes[item as usize] = slope;
        more[item as usize] = of_last;
        item += comptime![cube.units];
    }
    sync_cube();
    if UNIT_POS < side {
        let head = first + UNIT_POS;
        if head < heads {
            let block = CUBE_POS_X * heads + head;
            let mut state = 0.0f32;
            for part in 0..parts {
                state += along[(part * blocks * heads + block) as usize];
            }
            let mut sum = state * since[(block * chunk + comptime![chunk - 1]) as usize];
            for l in 0..chunk {
                sum += more[(UNIT_POS * chunk + l) as usize];
            }
            // A position's logarithm is in the sums of all positions from it on.
            for l in 0..chunk {
                let at = (UNIT_POS * chunk + comptime![chunk - 1] - l) as usize;
                sum += slopes[at];
                slopes[at] = sum;
            }
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
                let at = ((CUBE_POS_X * heads + head) * chunk + l) as usize;
                let rate = -exp(f32::cast_from(a_log[head as usize]));
                let slope = slopes[item as usize] * rate;
                let place = ((t * samples + sample) * heads + head) as usize;
                of_rate = slope * steps[at];
                of_raw = slope * sigmoid(f32::cast_from(raw[place]) + f32::cast_from(bias[head as usize]));
                raw_gradient[place] = E::cast_from(of_raw);
                let beta = sigmoid(f32::cast_from(raw_beta[place]));
                beta_gradient[place] = E::cast_from(of_beta[at] * beta * (1.0 - beta));
            }
        }
        more[item as usize] = of_raw;
        slopes[item as usize] = of_rate;
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
                of_rate += slopes[(UNIT_POS * chunk + l) as usize];
            }
            partials[(CUBE_POS_X * 2 * heads + head) as usize] = of_bias;
            partials[((CUBE_POS_X * 2 + 1) * heads + head) as usize] = of_rate;
        }
    }
}

/// Sums of the other kernels' backward passes, fp32, `[b, c, h, l]` but the last.
#[derive(Clone, Copy, Debug)]
pub struct GateSums<'a> {
    /// The gradient of β.
    pub beta: &'a Handle,
    /// Of the sums of logarithms through the systems and the decayed scores.
    pub sums: &'a Handle,
    /// Of `until`.
    pub until: &'a Handle,
    /// Of `since` through the answers of states.
    pub since: &'a Handle,
    /// See [`states`](super::states::backward).
    pub along: &'a Handle,
}

/// The gradients of the steps and of β before their functions, `[s, b, h]` of type `E`, and in fp32 `[2, h]` those of the
/// steps' bias and of `a_log`.
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too short.
pub fn backward<E: Float>(
    client: &Client,
    inputs: StepInputs,
    raw_beta: &Handle,
    decays: Decays,
    sums: GateSums,
    [raw_gradient, beta_gradient, head_gradients]: [&Handle; 3],
    shape: SsdShape,
) -> Result<(), PointwiseError> {
    shape.check_delta()?;
    let (cube, numbers, heads) = (CubeShape::of(client), shape.per_head(), shape.heads);
    let (blocks, parts) = (shape.samples * shape.chunks(), shape.state_parts());
    let positions = shape.seq * shape.samples * heads;
    let partials = client.empty(4 * blocks * 2 * heads);
    let [raw, bias, a_log, _] = inputs.buffers::<E>(decays.steps, shape)?;
    let [steps, _, until, since] = decays.buffers(shape)?;
    let number = |name, handle| buffer(name, handle, numbers, 4);
    // SAFETY: every cube stays in its chunk and heads, and the buffers hold all of them.
    unsafe {
        launch_kernel!(chunk_gates_gradients<E>, client, cubes(cube, shape), cube.dim();
            raw, bias, a_log, buffer("raw_beta", raw_beta, positions, size_of::<E>())?, steps, until, since,
            number("of_beta", sums.beta)?, number("of_sums", sums.sums)?, number("of_until", sums.until)?,
            number("of_since", sums.since)?, buffer("along", sums.along, parts * blocks * heads, 4)?,
            buffer("raw_gradient", raw_gradient, positions, size_of::<E>())?,
            buffer("beta_gradient", beta_gradient, positions, size_of::<E>())?,
            buffer("parts", &partials, blocks * 2 * heads, 4)?;
            shape.seq as u32, shape.samples as u32, shape.chunks() as u32, blocks as u32;
            parts as u32, shape.form(false), cube)
    };
    sum_partials(client, &partials, head_gradients, blocks, 2 * heads)
}
