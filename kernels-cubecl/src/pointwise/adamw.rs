//! AdamW over a flat bucket of many tensors, in one pass.
use super::flat::FloatType;
use super::{CubeShape, F32x4, PointwiseError, buffer, check};
use crate::narrow::kernel::{self as narrow, Halves};
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

/// Scalars of a step, the same for all elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment after bias correction.
    pub eps: f32,
    /// `lr / (1 − beta1ᵗ)`
    pub step_size: f32,
    /// `1 / √(1 − beta2ᵗ)`
    pub root_scale: f32,
    /// `1 − lr · weight_decay`, for the tensors that decay.
    pub keep: f32,
    /// Multiplies every gradient: averaging and clipping.
    pub gradient_scale: f32,
    /// Number of the step, for the random bits of moments in bf16.
    pub step: u32,
}

/// Where the parameters are kept.
#[derive(Clone, Copy, Debug)]
pub enum Parameters<'a> {
    /// In fp32 only.
    Wide(&'a Handle),
    /// In fp32, and rounded to the type that the model computes with.
    Master(&'a Handle, &'a Handle, FloatType),
    /// As bf16 weights, with which the model computes, and 16-bit remainders ([`crate::narrow::split`]).
    Split(&'a Handle, &'a Handle),
}

impl Parameters<'_> {
    /// The type of the weights, fp32 where there are no others than the masters; and whether these are weights and
    /// remainders.
    pub(super) fn form(&self) -> (FloatType, bool) {
        match self {
            Self::Wide(_) => (FloatType::F32, false),
            Self::Master(_, _, float) => (*float, false),
            Self::Split(..) => (FloatType::Bf16, true),
        }
    }

    /// Masters, weights in words of two, remainders, and weights. Arguments of other forms than the parameters' are any
    /// buffer, which a kernel then does not access.
    pub(super) fn buffers(&self, vectors: usize) -> Result<[BufferArg; 4], PointwiseError> {
        let (weight, rest) = match self {
            Self::Wide(master) => (*master, *master),
            Self::Master(master, weight, _) => (*weight, *master),
            Self::Split(weight, remainder) => (*weight, *remainder),
        };
        let (float, split) = self.form();
        Ok([
            buffer("master", rest, vectors, if split { 8 } else { 16 })?,
            buffer("weight", weight, vectors, 8)?,
            buffer("remainder", rest, vectors, 8)?,
            buffer("weight", weight, vectors, 4 * float.size())?,
        ])
    }
}

/// The buffers of a bucket of `len` parameters. Zeros between tensors stay zeros.
#[derive(Clone, Copy, Debug)]
pub struct AdamWBucket<'a> {
    /// The parameters.
    pub parameters: Parameters<'a>,
    /// First moment in fp32 or bf16, which is rounded stochastically ([`crate::narrow::round`]).
    pub first: (&'a Handle, FloatType),
    /// Second moment, likewise.
    pub second: (&'a Handle, FloatType),
    /// Summed gradients in fp32 or bf16.
    pub gradient: (&'a Handle, FloatType),
    /// One past the last element of each tensor and the gap after it, `u32`, ascending; the last is `len`.
    pub ends: &'a Handle,
    /// For each tensor 1 if it decays, else 0, `u32`.
    pub decays: &'a Handle,
    /// For each tensor the five words of its [`crate::narrow::Place`], given the number of an element in the bucket.
    pub places: &'a Handle,
    /// Tensors.
    pub tensors: usize,
    /// Parameters; a multiple of four.
    pub len: usize,
}

/// What is read and written in another form than fp32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Forms {
    /// Weights are written next to the masters.
    pub narrow: bool,
    /// Masters are weights and remainders.
    pub split: bool,
    /// The first moment is bf16.
    pub first: bool,
    /// The second moment is bf16.
    pub second: bool,
}

/// The first tensor that ends after the element `at`.
#[cube]
pub(super) fn tensor_of(ends: &[u32], tensors: u32, at: u32) -> u32 {
    let mut low = 0u32;
    let mut high = tensors - 1;
    while low < high {
        let middle = (low + high) / 2;
        if ends[middle as usize] > at {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}

/// Both moments after a gradient.
#[cube]
pub(super) fn next_moments(first: f32, second: f32, grad: f32, beta1: f32, beta2: f32) -> (f32, f32) {
    (beta1 * first + (1.0 - beta1) * grad, beta2 * second + (1.0 - beta2) * grad * grad)
}

#[cube(launch_unchecked)]
pub fn adamw_step<G: Float, M: Float, V: Float, W: Float>(
    master: &mut [F32x4],
    first: &mut [Vector<M, Const<4>>],
    second: &mut [Vector<V, Const<4>>],
    gradient: &[Vector<G, Const<4>>],
    weight: &mut [Vector<W, Const<4>>],
    halves: &mut [Halves],
    remainder: &mut [Halves],
    ends: &[u32],
    decays: &[u32],
    places: &[u32],
    tensors: u32,
    vectors: u32,
    step: u32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    step_size: f32,
    root_scale: f32,
    keep: f32,
    gradient_scale: f32,
    #[comptime] forms: Forms,
) {
    let at = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if at < vectors {
        let index = at as usize;
        let (grad, mut m, mut v) = (gradient[index], first[index], second[index]);
        let mut param =
            if comptime![forms.split] { narrow::join_vector(halves[index], remainder[index]) } else { master[index] };
        // The tensor of the first element; the others may be in later tensors.
        let mut tensor = tensor_of(ends, tensors, at * 4);
        let mut rounded = Vector::<W, Const<4>>::empty();
        #[unroll]
        for i in 0..4usize {
            while ends[tensor as usize] <= at * 4 + comptime![i as u32] {
                tensor += 1;
            }
            let keep = if decays[tensor as usize] == 1 { keep } else { 1.0f32.runtime() };
            let grad = f32::cast_from(grad.extract(i)) * gradient_scale;
            let (next_m, next_v) =
                next_moments(f32::cast_from(m.extract(i)), f32::cast_from(v.extract(i)), grad, beta1, beta2);
            let next = param.extract(i) * keep - step_size * next_m / (next_v.sqrt() * root_scale + eps);
            let mut random = 0u32;
            if comptime![forms.first || forms.second] {
                random = narrow::random(places, tensor, at * 4 + comptime![i as u32], step);
            }
            if comptime![forms.first] {
                m.insert(i, M::cast_from(narrow::round(next_m, random)));
            } else {
                m.insert(i, M::cast_from(next_m));
            }
            if comptime![forms.second] {
                v.insert(i, V::cast_from(narrow::round(next_v, random >> 16u32)));
            } else {
                v.insert(i, V::cast_from(next_v));
            }
            param.insert(i, next);
            rounded.insert(i, W::cast_from(next));
        }
        first[index] = m;
        second[index] = v;
        if comptime![forms.split] {
            let (upper, lower) = narrow::split_vector(param);
            halves[index] = upper;
            remainder[index] = lower;
        } else {
            master[index] = param;
        }
        if comptime![forms.narrow] {
            weight[index] = rounded;
        }
    }
}

/// One step of AdamW with decoupled weight decay over all parameters of the bucket.
///
/// # Errors
/// If a buffer is too short, `len` is no multiple of four, or a moment or the gradient is in fp16.
pub fn step(client: &Client, bucket: AdamWBucket, k: &AdamWStep) -> Result<(), PointwiseError> {
    check("len", bucket.len, 4, u32::MAX as usize - 3)?;
    check("tensors", bucket.tensors, 1, bucket.len)?;
    let (cube, vectors) = (CubeShape::of(client), bucket.len / 4);
    let of = |name, (handle, float): (&Handle, FloatType)| match float {
        FloatType::F16 => Err(PointwiseError::Float { name, found: float }),
        float => buffer(name, handle, vectors, 4 * float.size()),
    };
    let (first, second) = (of("first", bucket.first)?, of("second", bucket.second)?);
    let gradient = of("gradient", bucket.gradient)?;
    let ends = buffer("ends", bucket.ends, bucket.tensors, 4)?;
    let decays = buffer("decays", bucket.decays, bucket.tensors, 4)?;
    let places = buffer("places", bucket.places, 5 * bucket.tensors, 4)?;
    let (float, split) = bucket.parameters.form();
    let [master, halves, remainder, weight] = bucket.parameters.buffers(vectors)?;
    let [is_first, is_second, is_gradient] =
        [bucket.first, bucket.second, bucket.gradient].map(|(_, float)| float == FloatType::Bf16);
    let narrow = float != FloatType::F32 && !split;
    let forms = Forms { narrow, split, first: is_first, second: is_second };
    macro_rules! launch {
        ($($type:ty),*) => {
            // SAFETY: units past the last vector do nothing, and the caller's `ends` reach `len`.
            unsafe {
                launch_kernel!(adamw_step<$($type),*>, client, cube.line(vectors), cube.dim();
                    master, first, second, gradient, weight, halves, remainder, ends, decays, places;
                    bucket.tensors as u32, vectors as u32, k.step, k.beta1, k.beta2, k.eps, k.step_size, k.root_scale,
                    k.keep, k.gradient_scale; forms)
            }
        };
    }
    macro_rules! with_weight {
        ($($type:ty),*) => {
            match float {
                FloatType::F32 => launch!($($type),*, f32),
                FloatType::Bf16 => launch!($($type),*, bf16),
                FloatType::F16 => launch!($($type),*, f16),
            }
        };
    }
    macro_rules! with_moments {
        ($gradient:ty) => {
            match (is_first, is_second) {
                (false, false) => with_weight!($gradient, f32, f32),
                (true, false) => with_weight!($gradient, bf16, f32),
                (false, true) => with_weight!($gradient, f32, bf16),
                (true, true) => with_weight!($gradient, bf16, bf16),
            }
        };
    }
    if is_gradient {
        with_moments!(bf16)
    } else {
        with_moments!(f32)
    }
    Ok(())
}
