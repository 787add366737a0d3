//! AdamW over a flat bucket of many tensors, in one pass.
use super::flat::FloatType;
use super::{CubeShape, F32x4, PointwiseError, buffer, check};
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
}

/// The buffers of a bucket of `len` parameters. Zeros between tensors stay zeros.
#[derive(Clone, Copy, Debug)]
pub struct AdamWBucket<'a> {
    /// Parameters in fp32.
    pub master: &'a Handle,
    /// First moment in fp32.
    pub first: &'a Handle,
    /// Second moment in fp32.
    pub second: &'a Handle,
    /// Summed gradients in fp32.
    pub gradient: &'a Handle,
    /// The parameters that the model computes with, if their type is narrower than `master`.
    pub weight: Option<(&'a Handle, FloatType)>,
    /// One past the last element of each tensor and the gap after it, `u32`, ascending; the last is `len`.
    pub ends: &'a Handle,
    /// For each tensor 1 if it decays, else 0, `u32`.
    pub decays: &'a Handle,
    /// Tensors.
    pub tensors: usize,
    /// Parameters; a multiple of four.
    pub len: usize,
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

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn adamw_step<W: Float>(
    master: &mut [F32x4],
    first: &mut [F32x4],
    second: &mut [F32x4],
    gradient: &[F32x4],
    weight: &mut [Vector<W, Const<4>>],
    ends: &[u32],
    decays: &[u32],
    tensors: u32,
    vectors: u32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    step_size: f32,
    root_scale: f32,
    keep: f32,
    gradient_scale: f32,
    #[comptime] narrow: bool,
) {
    let at = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if at < vectors {
        let index = at as usize;
        let (grad, mut param, mut m, mut v) = (gradient[index], master[index], first[index], second[index]);
        // The tensor of the first element; the others may be in later tensors.
        let mut tensor = tensor_of(ends, tensors, at * 4);
        let mut rounded = Vector::<W, Const<4>>::empty();
        #[unroll]
        for i in 0..4usize {
            while ends[tensor as usize] <= at * 4 + comptime![i as u32] {
                tensor += 1;
            }
            let keep = if decays[tensor as usize] == 1 { keep } else { 1.0f32.runtime() };
            let grad = grad.extract(i) * gradient_scale;
            let next_m = beta1 * m.extract(i) + (1.0 - beta1) * grad;
            let next_v = beta2 * v.extract(i) + (1.0 - beta2) * grad * grad;
            let next = param.extract(i) * keep - step_size * next_m / (next_v.sqrt() * root_scale + eps);
            m.insert(i, next_m);
            v.insert(i, next_v);
            param.insert(i, next);
            rounded.insert(i, W::cast_from(next));
        }
        master[index] = param;
        first[index] = m;
        second[index] = v;
        if comptime![narrow] {
            weight[index] = rounded;
        }
    }
}

/// One step of AdamW with decoupled weight decay over all parameters of the bucket.
///
/// # Errors
/// If a buffer is too short, or `len` is no multiple of four.
pub fn step(client: &Client, bucket: AdamWBucket, k: &AdamWStep) -> Result<(), PointwiseError> {
    check("len", bucket.len, 4, u32::MAX as usize - 3)?;
    check("tensors", bucket.tensors, 1, bucket.len)?;
    let (cube, vectors) = (CubeShape::of(client), bucket.len / 4);
    let (master, first) = (buffer("master", bucket.master, vectors, 16)?, buffer("first", bucket.first, vectors, 16)?);
    let second = buffer("second", bucket.second, vectors, 16)?;
    let gradient = buffer("gradient", bucket.gradient, vectors, 16)?;
    let ends = buffer("ends", bucket.ends, bucket.tensors, 4)?;
    let decays = buffer("decays", bucket.decays, bucket.tensors, 4)?;
    // Without narrow weights this argument is the masters, which the kernel then does not write twice.
    let (weight, float) = bucket.weight.unwrap_or((bucket.master, FloatType::F32));
    let weight = buffer("weight", weight, vectors, 4 * float.size())?;
    macro_rules! launch {
        ($weight:ty, $narrow:literal) => {
            // SAFETY: units past the last vector do nothing, and the caller's `ends` reach `len`.
            unsafe {
                adamw_step::launch_unchecked::<$weight>(
                    client,
                    cube.line(vectors),
                    cube.dim(),
                    master,
                    first,
                    second,
                    gradient,
                    weight,
                    ends,
                    decays,
                    bucket.tensors as u32,
                    vectors as u32,
                    k.beta1,
                    k.beta2,
                    k.eps,
                    k.step_size,
                    k.root_scale,
                    k.keep,
                    k.gradient_scale,
                    $narrow,
                )
            }
        };
    }
    match float {
        FloatType::F32 => launch!(f32, false),
        FloatType::Bf16 => launch!(bf16, true),
        FloatType::F16 => launch!(f16, true),
    }
    Ok(())
}
