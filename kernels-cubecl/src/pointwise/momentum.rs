//! SGD and Lion over a flat bucket of many tensors, in one pass.
use super::{CubeShape, F32x4, PointwiseError, adamw::tensor_of, buffer, check, flat::FloatType};
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

/// How the momentum and the step follow from the gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MomentumRule {
    /// `step = g`; there is no momentum.
    Plain,
    /// `m ← a m + g`, `step = m`.
    Sum,
    /// `m ← a m + g`, `step = g + a m` with the new `m`.
    Nesterov,
    /// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", algorithm 2): `step = sign(a m + (1 − a)
    /// g)`, then `m ← b m + (1 − b) g`.
    Lion,
}

/// `p ← keep p − lr step`, where `keep` is 1 for tensors that do not decay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MomentumStep {
    /// The rule.
    pub rule: MomentumRule,
    /// Its `a`.
    pub a: f32,
    /// Its `b`.
    pub b: f32,
    /// Learning rate.
    pub lr: f32,
    /// `1 − lr · weight_decay`, for the tensors that decay.
    pub keep: f32,
    /// Multiplies every gradient: averaging and clipping.
    pub gradient_scale: f32,
}

/// The buffers of a bucket of `len` parameters.
#[derive(Clone, Copy, Debug)]
pub struct MomentumBucket<'a> {
    /// Parameters in fp32.
    pub master: &'a Handle,
    /// Momentum in fp32, unless the rule is [`MomentumRule::Plain`].
    pub momentum: Option<&'a Handle>,
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

#[cube(launch_unchecked)]
pub fn momentum_step<W: Float>(
    master: &mut [F32x4],
    momentum: &mut [F32x4],
    gradient: &[F32x4],
    weight: &mut [Vector<W, Const<4>>],
    ends: &[u32],
    decays: &[u32],
    tensors: u32,
    vectors: u32,
    a: f32,
    b: f32,
    lr: f32,
    keep: f32,
    gradient_scale: f32,
    #[comptime] rule: MomentumRule,
    #[comptime] narrow: bool,
) {
    let at = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if at < vectors {
        let index = at as usize;
        let (grad, mut param) = (gradient[index], master[index]);
        let mut m = F32x4::empty();
        if comptime![rule != MomentumRule::Plain] {
            m = momentum[index];
        }
        let mut tensor = tensor_of(ends, tensors, at * 4);
        let mut rounded = Vector::<W, Const<4>>::empty();
        #[unroll]
        for i in 0..4usize {
            while ends[tensor as usize] <= at * 4 + comptime![i as u32] {
                tensor += 1;
            }
            let keep = if decays[tensor as usize] == 1 { keep } else { 1.0f32.runtime() };
            let grad = grad.extract(i) * gradient_scale;
            let mut step = grad;
            if comptime![rule == MomentumRule::Lion] {
                let mixed = a * m.extract(i) + (1.0 - a) * grad;
                step = select(mixed > 0.0, 1.0f32, select(mixed < 0.0, -1.0f32, mixed));
                m.insert(i, b * m.extract(i) + (1.0 - b) * grad);
            } else if comptime![rule != MomentumRule::Plain] {
                let next = a * m.extract(i) + grad;
                m.insert(i, next);
                step = if comptime![rule == MomentumRule::Nesterov] { grad + a * next } else { next };
            }
            let next = param.extract(i) * keep - lr * step;
            param.insert(i, next);
            rounded.insert(i, W::cast_from(next));
        }
        master[index] = param;
        if comptime![rule != MomentumRule::Plain] {
            momentum[index] = m;
        }
        if comptime![narrow] {
            weight[index] = rounded;
        }
    }
}

/// One step over all parameters of the bucket.
///
/// # Errors
/// If a buffer is too short, the rule's momentum is missing, or `len` is no multiple of four.
pub fn step(client: &Client, bucket: MomentumBucket, k: &MomentumStep) -> Result<(), PointwiseError> {
    check("len", bucket.len, 4, u32::MAX as usize - 3)?;
    check("tensors", bucket.tensors, 1, bucket.len)?;
    let (cube, vectors) = (CubeShape::of(client), bucket.len / 4);
    let momentum = match (k.rule, bucket.momentum) {
        // The kernel then does not access the momentum.
        (MomentumRule::Plain, _) => bucket.master,
        (_, Some(momentum)) => momentum,
        (_, None) => {
            return Err(PointwiseError::Buffer { name: "momentum", found: 0, expected: 4 * bucket.len as u64 });
        }
    };
    let (master, momentum) =
        (buffer("master", bucket.master, vectors, 16)?, buffer("momentum", momentum, vectors, 16)?);
    let gradient = buffer("gradient", bucket.gradient, vectors, 16)?;
    let ends = buffer("ends", bucket.ends, bucket.tensors, 4)?;
    let decays = buffer("decays", bucket.decays, bucket.tensors, 4)?;
    let (weight, float) = bucket.weight.unwrap_or((bucket.master, FloatType::F32));
    let weight = buffer("weight", weight, vectors, 4 * float.size())?;
    macro_rules! launch {
        ($weight:ty, $narrow:literal) => {
            // SAFETY: units past the last vector do nothing, and the caller's `ends` reach `len`.
            unsafe {
                launch_kernel!(momentum_step<$weight>, client, cube.line(vectors), cube.dim();
                    master, momentum, gradient, weight, ends, decays;
                    bucket.tensors as u32, vectors as u32, k.a, k.b, k.lr, k.keep, k.gradient_scale; k.rule, $narrow)
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
