//! The gradients of the causal convolution.
use super::{ConvolutionShape, Form, Inputs, LONGEST, age_of, bias_of, cubes, seen_before, summed, taps_of};
use crate::pointwise::{CubeShape, F32x4, PointwiseError, Vec8, buffer, partial_sums::sum_partials, sigmoid::sigmoid};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Positions of a unit. Each run writes partial sums for all taps and reads `kernel - 1` positions more on both sides.
const RUN: u32 = 16;

/// As [`causal_convolution`](super::causal_convolution). A run's partial sums are a row of `partials`: those of the
/// taps, then those of the biases.
#[cube(launch_unchecked)]
pub fn convolution_gradients<E: Float>(
    x: &[Vec8<E>],
    weight: &[E],
    bias: &[E],
    ages: &[f32],
    y_gradient: &[Vec8<E>],
    x_gradient: &mut [Vec8<E>],
    partials: &mut [F32x4],
    seq: u32,
    samples: u32,
    width: u32,
    run: u32,
    #[comptime] form: Form,
) {
    let kernel = comptime![form.kernel];
    let column = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if column < width {
        let (start, stride) = (CUBE_POS_Z * width + column, samples * width);
        let taps = taps_of::<E>(weight, column, form);
        let biases = bias_of::<E>(bias, column, form);
        let first = CUBE_POS_Y * run;
        let last = min(first + run, seq);
        let mut seen = seen_before::<E>(x, first, start, stride, form);
        // Of the sums at the last `kernel` positions, with the ages of these.
        let mut slopes = Array::<f32>::new(comptime![8 * kernel as usize]);
        let mut old = Array::<f32>::new(comptime![kernel as usize]);
        let mut sums = Array::<f32>::new(comptime![8 * kernel as usize + 8]);
        #[unroll]
        for i in 0..comptime![8 * kernel as usize] {
            slopes[i] = 0.0f32;
        }
        #[unroll]
        for i in 0..comptime![kernel as usize] {
            old[i] = comptime![LONGEST as f32].runtime();
        }
        #[unroll]
        for i in 0..comptime![8 * kernel as usize + 8] {
            sums[i] = 0.0f32;
        }
        let mut at = first;
        while at < last + comptime![kernel - 1] {
            #[unroll]
            for slot in 0..kernel {
                let position = at + slot;
                if position < last + comptime![kernel - 1] {
                    if position < seq {
                        let place = (start + position * stride) as usize;
                        seen[comptime![slot as usize]] = x[place];
                        let dy = y_gradient[place];
                        let age = age_of(ages, position * samples + CUBE_POS_Z, form);
                        old[comptime![slot as usize]] = age;
                        #[unroll]
                        for i in 0..8usize {
                            let sum = summed::<E>(&seen, &taps, &biases, age, slot, i, form);
                            let s = sigmoid(sum);
                            let slope = f32::cast_from(dy.extract(i)) * s * (1.0 + sum * (1.0 - s));
                            slopes[comptime![slot as usize * 8 + i]] = slope;
                            if position < last {
                                let all = comptime![8 * kernel as usize + i];
                                sums[all] = sums[all] + slope;
                                #[unroll]
                                for d in 0..kernel {
                                    let value = seen[comptime![((slot + kernel - d) % kernel) as usize]].extract(i);
                                    let of_tap = comptime![i * kernel as usize + (kernel - 1 - d) as usize];
                                    let within = age >= comptime![d as f32].runtime();
                                    sums[of_tap] = sums[of_tap] + select(within, f32::cast_from(value) * slope, 0.0f32);
                                }
                            }
                        }
                    } else {
                        #[unroll]
                        for i in 0..8usize {
                            slopes[comptime![slot as usize * 8 + i]] = 0.0f32;
                        }
                    }
                    // All positions that see this one have come.
                    if position + 1 >= first + kernel {
                        let mut result = Vec8::<E>::empty();
                        #[unroll]
                        for i in 0..8usize {
                            let mut total = 0.0f32;
                            #[unroll]
                            for d in 0..kernel {
                                let from = comptime![((slot + 1 + d) % kernel) as usize];
                                let tap = taps[comptime![i * kernel as usize + (kernel - 1 - d) as usize]];
                                let term = slopes[comptime![from * 8 + i]] * tap;
                                total += select(old[from] >= comptime![d as f32].runtime(), term, 0.0f32);
                            }
                            result.insert(i, E::cast_from(total));
                        }
                        x_gradient[(start + (position + 1 - kernel) * stride) as usize] = result;
                    }
                }
            }
            at += kernel;
        }
        let line = (CUBE_POS_Z * CUBE_COUNT_Y + CUBE_POS_Y) * width * comptime![2 * kernel + 2];
        #[unroll]
        for v in 0..comptime![2 * kernel + 2] {
            let mut four = F32x4::empty();
            #[unroll]
            for i in 0..4usize {
                four.insert(i, sums[comptime![v as usize * 4 + i]]);
            }
            let mut place = line + column * comptime![2 * kernel] + v;
            if comptime![v >= 2 * kernel] {
                place = line + width * comptime![2 * kernel] + column * 2 + comptime![v - 2 * kernel];
            }
            partials[place as usize] = four;
        }
    }
}

/// The gradients of `x` (type `E`) and, in fp32, of the taps, `[features, kernel]`, and behind these of the bias,
/// `[features]`, in [`forward`](super::forward), given that of `y`. Deterministic.
pub fn backward<E: Float>(
    client: &Client,
    inputs: Inputs,
    y_gradient: &Handle,
    [x_gradient, weight_gradients]: [&Handle; 2],
    shape: ConvolutionShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let (vector, sums) = (8 * size_of::<E>(), shape.features * (shape.kernel + 1));
    let cube = CubeShape::of(client).fitting(shape.features / 8);
    let shares = shape.samples * shape.seq.div_ceil(RUN as usize);
    let partials = client.empty(4 * shares * sums);
    let [x, weight, bias, ages] = inputs.buffers::<E>(shape)?;
    let dy = buffer("y_gradient", y_gradient, shape.vectors(), vector)?;
    let dx = buffer("x_gradient", x_gradient, shape.vectors(), vector)?;
    let written = buffer("parts", &partials, shares * sums / 4, 16)?;
    // SAFETY: every unit stays in its features, positions and row of partial sums, and the buffers hold all of them.
    unsafe {
        launch_kernel!(convolution_gradients<E>, client, cubes(cube, shape, RUN), cube.dim();
            x, weight, bias, ages, dy, dx, written;
            shape.seq as u32, shape.samples as u32, shape.features as u32 / 8, RUN; inputs.form(shape))
    };
    sum_partials(client, &partials, weight_gradients, shares, sums)
}
