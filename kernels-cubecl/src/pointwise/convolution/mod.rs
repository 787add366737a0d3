//! The short causal convolution of each feature in front of a linear recurrence, with a bias and SiLU, and its gradients.
//!
//! A unit takes eight neighbouring features and a run of positions, and keeps the positions that the kernel still sees.
pub mod gradient;

pub use gradient::backward;

use super::sigmoid::sigmoid;
use super::{CubeShape, PointwiseError, Vec8, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Positions of a unit: each run reads `kernel - 1` positions more.
const RUN: u32 = 8;
/// Most positions of a sequence, and most sequences, for the cubes along y and z.
const MOST: usize = 65_535;
/// Longest kernel: a unit keeps its taps.
const LONGEST: usize = 8;

/// Sizes of a call: `x [seq, samples, features]`, `weight [features, kernel]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvolutionShape {
    /// Positions.
    pub seq: usize,
    /// Sequences.
    pub samples: usize,
    /// Features, each with a kernel of its own.
    pub features: usize,
    /// Positions that the convolution sees.
    pub kernel: usize,
}

impl ConvolutionShape {
    /// Whether there are kernels for this shape.
    pub fn has_kernel(&self) -> bool {
        self.check().is_ok()
    }

    fn check(&self) -> Result<(), PointwiseError> {
        check("features", self.features, 8, 1 << 20)?;
        check("kernel", self.kernel, 1, LONGEST)?;
        check("positions", self.seq, 1, MOST * RUN as usize)?;
        check("sequences", self.samples, 1, MOST)?;
        check("rows", self.seq * self.samples, 1, super::MOST / (self.features / 8))
    }

    fn vectors(&self) -> usize {
        self.seq * self.samples * self.features / 8
    }
}

/// What a call has, at compile time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Form {
    /// Taps.
    pub kernel: u32,
    /// There is a bias.
    pub biased: bool,
    /// There are several documents.
    pub divided: bool,
}

/// The tensors of a call but what it computes: `x`, the taps and the bias of type `E`. `ages`, fp32 `[seq, samples]`, is
/// the number of positions of the same document in front of each position; without it, there is one document.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// `[seq, samples, features]`.
    pub x: &'a Handle,
    /// `[features, kernel]`, the current position last.
    pub weight: &'a Handle,
    /// `[features]`.
    pub bias: Option<&'a Handle>,
    /// `[seq, samples]`.
    pub ages: Option<&'a Handle>,
}

impl Inputs<'_> {
    fn form(&self, shape: ConvolutionShape) -> Form {
        Form { kernel: shape.kernel as u32, biased: self.bias.is_some(), divided: self.ages.is_some() }
    }

    /// The buffers. One that is not there is never read; some buffer stands in its place.
    fn buffers<E: Float>(&self, shape: ConvolutionShape) -> Result<[BufferArg; 4], PointwiseError> {
        let ConvolutionShape { seq, samples, features, kernel } = shape;
        let (size, weights) = (size_of::<E>(), features * kernel);
        let taps = || buffer("the taps", self.weight, weights, size);
        let bias = self.bias.map_or_else(taps, |bias| buffer("the bias", bias, features, size))?;
        let ages = self.ages.map(|ages| buffer("ages", ages, seq * samples, 4));
        let ages = ages.unwrap_or_else(|| buffer("the taps", self.weight, 1, 4))?;
        Ok([buffer("x", self.x, shape.vectors(), 8 * size)?, taps()?, bias, ages])
    }
}

/// The taps of a unit's features, feature by feature.
#[cube]
fn taps_of<E: Float>(weight: &[E], column: u32, #[comptime] form: Form) -> Array<f32> {
    let count = comptime![8 * form.kernel];
    let mut taps = Array::<f32>::new(comptime![count as usize]);
    #[unroll]
    for i in 0..count {
        taps[comptime![i as usize]] = f32::cast_from(weight[(column * count + i) as usize]);
    }
    taps
}

#[cube]
fn bias_of<E: Float>(bias: &[E], column: u32, #[comptime] form: Form) -> Array<f32> {
    let mut biases = Array::<f32>::new(8usize);
    #[unroll]
    for i in 0..8u32 {
        let slot = comptime![i as usize];
        biases[slot] = 0.0f32;
        if comptime![form.biased] {
            biases[slot] = f32::cast_from(bias[(column * 8 + i) as usize]);
        }
    }
    biases
}

/// The positions in front of `first`, position `first - d` in place `kernel - d`; zeros in front of the sequence.
#[cube]
fn seen_before<E: Float>(x: &[Vec8<E>], first: u32, start: u32, stride: u32, #[comptime] form: Form) -> Array<Vec8<E>> {
    let mut seen = Array::<Vec8<E>>::new(comptime![form.kernel as usize]);
    #[unroll]
    for d in 1..comptime![form.kernel] {
        let mut value = Vec8::<E>::new(E::from_int(0));
        if first >= d {
            value = x[(start + (first - d) * stride) as usize];
        }
        seen[comptime![(form.kernel - d) as usize]] = value;
    }
    seen
}

/// How many positions of the same document are in front of position `place`, or more than any kernel sees.
#[cube]
fn age_of(ages: &[f32], place: u32, #[comptime] form: Form) -> f32 {
    if comptime![form.divided] { ages[place as usize] } else { comptime![LONGEST as f32].runtime() }
}

/// Feature `i` of the sum at the position in place `slot` of `seen`, before SiLU.
#[cube]
fn summed<E: Float>(
    seen: &Array<Vec8<E>>,
    taps: &Array<f32>,
    biases: &Array<f32>,
    age: f32,
    #[comptime] slot: u32,
    #[comptime] i: usize,
    #[comptime] form: Form,
) -> f32 {
    let kernel = comptime![form.kernel];
    let mut sum = biases[i];
    #[unroll]
    for d in 0..kernel {
        let value = seen[comptime![((slot + kernel - d) % kernel) as usize]].extract(i);
        let term = f32::cast_from(value) * taps[comptime![i * kernel as usize + (kernel - 1 - d) as usize]];
        if comptime![form.divided && d > 0] {
            sum += select(age >= comptime![d as f32].runtime(), term, 0.0f32);
        } else {
            sum += term;
        }
    }
    sum
}

/// Cubes along x take the features, along y runs of `run` positions, along z sequences. Lengths are in vectors.
#[cube(launch_unchecked)]
pub fn causal_convolution<E: Float>(
    x: &[Vec8<E>],
    weight: &[E],
    bias: &[E],
    ages: &[f32],
    y: &mut [Vec8<E>],
    seq: u32,
    samples: u32,
    width: u32,
    run: u32,
    #[comptime] form: Form,
) {
    let column = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if column < width {
        let (start, stride) = (CUBE_POS_Z * width + column, samples * width);
        let taps = taps_of::<E>(weight, column, form);
        let biases = bias_of::<E>(bias, column, form);
        let first = CUBE_POS_Y * run;
        let last = min(first + run, seq);
        let mut seen = seen_before::<E>(x, first, start, stride, form);
        let mut at = first;
        while at < last {
            #[unroll]
            for slot in 0..comptime![form.kernel] {
                let position = at + slot;
                if position < last {
                    let place = (start + position * stride) as usize;
                    seen[comptime![slot as usize]] = x[place];
                    let age = age_of(ages, position * samples + CUBE_POS_Z, form);
                    let mut result = Vec8::<E>::empty();
                    #[unroll]
                    for i in 0..8usize {
                        let sum = summed::<E>(&seen, &taps, &biases, age, slot, i, form);
                        result.insert(i, E::cast_from(sum * sigmoid(sum)));
                    }
                    y[place] = result;
                }
            }
            at += comptime![form.kernel];
        }
    }
}

/// Cubes of a call whose units take `run` positions each.
fn cubes(cube: CubeShape, shape: ConvolutionShape, run: u32) -> CubeCount {
    let columns = (shape.features as u32 / 8).div_ceil(cube.units);
    CubeCount::Static(columns, (shape.seq as u32).div_ceil(run), shape.samples as u32)
}

/// `y [seq, samples, features]` of type `E`: `silu(bias + Σ weight[kernel - 1 - d] x[position - d])` for each feature,
/// over distances `d` that stay in the document. Sums are fp32.
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too short.
pub fn forward<E: Float>(
    client: &Client,
    inputs: Inputs,
    y: &Handle,
    shape: ConvolutionShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let cube = CubeShape::of(client).fitting(shape.features / 8);
    let [x, weight, bias, ages] = inputs.buffers::<E>(shape)?;
    let y = buffer("y", y, shape.vectors(), 8 * size_of::<E>())?;
    // SAFETY: every unit stays in its features and positions, and the buffers hold all of them.
    unsafe {
        launch_kernel!(causal_convolution<E>, client, cubes(cube, shape, RUN), cube.dim();
            x, weight, bias, ages, y; shape.seq as u32, shape.samples as u32, shape.features as u32 / 8, RUN;
            inputs.form(shape))
    };
    Ok(())
}
