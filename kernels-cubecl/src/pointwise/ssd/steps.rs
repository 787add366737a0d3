//! Step sizes, and the shares of a state that stay.
use super::{CubeShape, Form, PointwiseError, SsdShape, ages_of, buffer, exp, sees};
use crate::hopper::ptx;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Heads of a cube.
const SIDE: u32 = 8;

/// Heads of a cube and its units.
pub(in crate::pointwise) fn side(cube: CubeShape) -> u32 {
    SIDE.min(cube.units)
}

/// Cubes of a call: blocks of positions along x, heads along y.
pub(in crate::pointwise) fn cubes(cube: CubeShape, shape: SsdShape) -> CubeCount {
    CubeCount::Static((shape.samples * shape.chunks()) as u32, (shape.heads as u32).div_ceil(side(cube)), 1)
}

/// `log(1 + eˣ)` to rounding: `log(1 + e) = 2 artanh(e / (2 + e))` by its series.
#[cube]
fn softplus(x: f32) -> f32 {
    let small = exp(-max(x, -x));
    let z = small * ptx::reciprocal(2.0 + small);
    let square = z * z;
    let mut sum = square * (1.0f32 / 15.0f32) + 1.0f32 / 13.0f32;
    sum = sum * square + 1.0f32 / 11.0f32;
    sum = sum * square + 1.0f32 / 9.0f32;
    sum = sum * square + 1.0f32 / 7.0f32;
    sum = sum * square + 1.0f32 / 5.0f32;
    sum = sum * square + 1.0f32 / 3.0f32;
    sum = sum * square + 1.0f32;
    max(x, 0.0) + 2.0 * z * sum
}

/// A cube takes a chunk of some heads: step sizes and the sums of their logarithms of shares, one head a unit.
#[cube(launch_unchecked)]
pub fn chunk_steps<E: Float>(
    raw: &[E],
    bias: &[E],
    a_log: &[E],
    ages: &[f32],
    steps: &mut [f32],
    sums: &mut [f32],
    until: &mut [f32],
    since: &mut [f32],
    seq: u32,
    samples: u32,
    chunks: u32,
    smallest: f32,
    largest: f32,
    #[comptime] form: Form,
    #[comptime] cube: CubeShape,
) {
    let (side, chunk) = comptime![(side(cube), form.chunk)];
    let mut shared = Shared::<[f32]>::new_slice(comptime![(side * chunk) as usize]);
    let (sample, c) = (CUBE_POS_X / chunks, CUBE_POS_X % chunks);
    let first = CUBE_POS_Y * side;
    let mut item = UNIT_POS;
    while item < comptime![side * chunk] {
        let (own, l) = (item % side, item / side);
        let (head, t) = (first + own, c * chunk + l);
        let mut share = 0.0f32;
        if head < comptime![form.heads] {
            let mut step = 0.0f32;
            if t < seq {
                let x = f32::cast_from(raw[((t * samples + sample) * comptime![form.heads] + head) as usize]);
                step = softplus(x + f32::cast_from(bias[head as usize]));
                step = min(max(step, smallest), largest);
            }
            steps[((CUBE_POS_X * comptime![form.heads] + head) * chunk + l) as usize] = step;
            share = -step * exp(f32::cast_from(a_log[head as usize]));
        }
        shared[(own * chunk + l) as usize] = share;
        item += comptime![cube.units];
    }
    sync_cube();
    if UNIT_POS < side {
        let mut sum = 0.0f32;
        for l in 0..chunk {
            sum += shared[(UNIT_POS * chunk + l) as usize];
            shared[(UNIT_POS * chunk + l) as usize] = sum;
        }
    }
    sync_cube();
    // The last position that does not pad.
    let end = min(chunk, seq - c * chunk) - 1;
    let mut item = UNIT_POS;
    while item < comptime![side * chunk] {
        let (own, l) = (item / chunk, item % chunk);
        let head = first + own;
        if head < comptime![form.heads] {
            let (sum, last) = (shared[item as usize], shared[(own * chunk + chunk - 1) as usize]);
            let at = ((CUBE_POS_X * comptime![form.heads] + head) * chunk + l) as usize;
            sums[at] = sum;
            let own_end = min(l, end);
            let stays = sees(ages, c * chunk + end, sample, seq, samples, end - own_end, form);
            until[at] = select(stays, exp(last - sum), 0.0f32);
            let enters = sees(ages, c * chunk + own_end, sample, seq, samples, own_end + min(c, 1), form);
            since[at] = select(enters, exp(sum), 0.0f32);
        }
        item += comptime![cube.units];
    }
}

/// What the step sizes are computed from, of type `E`, and their limits.
#[derive(Clone, Copy, Debug)]
pub struct StepInputs<'a> {
    /// Before the bias and softplus, `[s, b, h]`.
    pub raw: &'a Handle,
    /// `[h]`.
    pub bias: &'a Handle,
    /// The logarithm of the rate of forgetting, `[h]`.
    pub a_log: &'a Handle,
    /// Positions of the same document in front of each position, `[s, b]`, fp32.
    pub ages: Option<&'a Handle>,
    /// Smallest and largest step.
    pub limits: [f32; 2],
}

/// Numbers `[b, c, h, l]`.
#[derive(Clone, Copy, Debug)]
pub struct Decays<'a> {
    /// Step sizes; padding has zero.
    pub steps: &'a Handle,
    /// Sums of the logarithms of shares, from the beginning of the chunk to behind a position.
    pub sums: &'a Handle,
    /// The share of what a position adds that is left behind its chunk; zero if another document begins.
    pub until: &'a Handle,
    /// The share of the state in front of the chunk that is left behind a position; zero if another document begins.
    pub since: &'a Handle,
}

impl Decays<'_> {
    pub(in crate::pointwise) fn buffers(&self, shape: SsdShape) -> Result<[BufferArg; 4], PointwiseError> {
        let of = |name, handle| buffer(name, handle, shape.per_head(), 4);
        Ok([of("steps", self.steps)?, of("sums", self.sums)?, of("until", self.until)?, of("since", self.since)?])
    }
}

impl StepInputs<'_> {
    /// `other` stands in the place of ages if there is one document.
    pub(in crate::pointwise) fn buffers<E: Float>(
        &self,
        other: &Handle,
        shape: SsdShape,
    ) -> Result<[BufferArg; 4], PointwiseError> {
        let size = size_of::<E>();
        Ok([
            buffer("step sizes", self.raw, shape.seq * shape.samples * shape.heads, size)?,
            buffer("their bias", self.bias, shape.heads, size)?,
            buffer("the rates", self.a_log, shape.heads, size)?,
            ages_of(self.ages, other, shape)?,
        ])
    }
}

/// Step sizes and decays of all chunks.
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too short.
pub fn forward<E: Float>(
    client: &Client,
    inputs: StepInputs,
    decays: Decays,
    shape: SsdShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let cube = CubeShape::of(client);
    let ([raw, bias, a_log, ages], [steps, sums, until, since]) =
        (inputs.buffers::<E>(decays.steps, shape)?, decays.buffers(shape)?);
    // SAFETY: every cube stays in its chunk and heads, and the buffers hold all of them.
    unsafe {
        launch_kernel!(chunk_steps<E>, client, cubes(cube, shape), cube.dim();
            raw, bias, a_log, ages, steps, sums, until, since;
            shape.seq as u32, shape.samples as u32, shape.chunks() as u32, inputs.limits[0], inputs.limits[1];
            shape.form(inputs.ages.is_some()), cube)
    };
    Ok(())
}
