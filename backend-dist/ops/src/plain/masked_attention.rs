//! Attention with masks for single scores, with the whole score matrix.

use burn::backend::{Backend, Scalar, TensorData, TensorMetadata, tensor::FloatTensor as Float};

use super::{reshape, scale, widen};
use crate::attention_masks::{AttentionMasks, Kept};
use crate::dtype::cast;
use crate::kernels::LocalKernels;

/// Added to a hidden score: below every score, but finite in f32.
const HIDDEN: f64 = -1e30;

/// Output `[s, b, h, d]` and log-sum-exp `[b, h, s]`.
pub fn forward<B: LocalKernels>([q, k, v]: [Float<B>; 3], masks: &AttentionMasks<B>, factor: f64) -> [Float<B>; 2] {
    let dtype = q.dtype();
    let [q, k, v] = [q, k, v].map(by_head::<B>);
    let scores = Scores::new(q, k, masks, factor);
    let max = B::float_max_dim(scores.masked.clone(), 3);
    let p = scores.shown(B::float_exp(B::float_sub(scores.masked.clone(), max.clone())));
    // The largest score adds one: the sum is less only where a query sees no key.
    let sum = B::float_clamp_min(B::sum_dim(p.clone(), 3), Scalar::Float(1.0));
    let out = B::float_div(B::matmul(scores.kept(p), v), sum.clone());
    let lse = B::float_add(max, B::float_log(sum));
    let rows = lse.shape()[..3].to_vec();
    [cast::<B>(by_position::<B>(out), dtype), reshape::<B>(lse, rows)]
}

/// Gradients in q, k and v, as [`grads_at`](super::attention::grads_at) has them.
pub fn grads<B: LocalKernels>(
    [q, k, v]: [Float<B>; 3],
    [out, lse]: [Float<B>; 2],
    grad: Float<B>,
    masks: &AttentionMasks<B>,
    factor: f64,
) -> [Float<B>; 3] {
    let dtype = q.dtype();
    let [q, k, v, out, grad] = [q, k, v, out, grad].map(by_head::<B>);
    let scores = Scores::new(q.clone(), k.clone(), masks, factor);
    let rows = [&lse.shape()[..3], &[1]].concat();
    let lse = reshape::<B>(lse, rows);
    let p = scores.shown(B::float_exp(B::float_sub(scores.masked.clone(), lse)));
    let transposed = |x| B::float_swap_dims(x, 2, 3);
    let dv = B::matmul(transposed(scores.kept(p.clone())), grad.clone());
    let delta = B::sum_dim(B::float_mul(grad.clone(), out), 3);
    let dp = scores.kept(B::matmul(grad, transposed(v)));
    let ds = scale::<B>(B::float_mul(p, B::float_sub(dp, delta)), factor);
    let (dq, dk) = (B::matmul(ds.clone(), k), B::matmul(transposed(ds), q));
    [dq, dk, dv].map(|x| cast::<B>(by_position::<B>(x), dtype))
}

/// All scores of a call, and its masks in their type.
struct Scores<B: Backend> {
    /// `[b, h, s, keys]`; hidden ones are far below all others.
    masked: Float<B>,
    visible: Option<Float<B>>,
    kept: Option<Float<B>>,
}

impl<B: LocalKernels> Scores<B> {
    fn new(q: Float<B>, k: Float<B>, masks: &AttentionMasks<B>, factor: f64) -> Self {
        let scores = scale::<B>(B::matmul(q, B::float_swap_dims(k, 2, 3)), factor);
        let (shape, dtype) = (scores.shape(), scores.dtype());
        let hidden = masks.hidden.clone().map(|hidden| cast::<B>(hidden, dtype));
        let visible = hidden.clone().map(|x| B::float_add_scalar(B::float_neg(x), Scalar::Float(1.0)));
        let masked = match (hidden, &visible) {
            (Some(hidden), Some(visible)) => {
                B::float_add(B::float_mul(scores, visible.clone()), scale::<B>(hidden, HIDDEN))
            }
            _ => scores,
        };
        let kept = masks.kept.map(|Kept { draw, factor }| {
            let values = (0..shape.num_elements() as u64).map(|index| factor * draw.bernoulli(index)).collect();
            B::float_from_data(TensorData::new(values, shape).convert_dtype(dtype), &masked.device())
        });
        Self { masked, visible, kept }
    }

    /// `x` where a score is visible, else zero.
    fn shown(&self, x: Float<B>) -> Float<B> {
        self.visible.iter().fold(x, |x, visible| B::float_mul(x, visible.clone()))
    }

    /// `x` times what dropout multiplies weights by.
    fn kept(&self, x: Float<B>) -> Float<B> {
        self.kept.iter().fold(x, |x, kept| B::float_mul(x, kept.clone()))
    }
}

/// `[s, b, h, d]` as `[b, h, s, d]`, in f32 if it is in half precision.
fn by_head<B: Backend>(x: Float<B>) -> Float<B> {
    B::float_permute(widen::<B>(x).0, &[1, 2, 0, 3])
}

fn by_position<B: Backend>(x: Float<B>) -> Float<B> {
    B::float_permute(x, &[2, 0, 1, 3])
}
