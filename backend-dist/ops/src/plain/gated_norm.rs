//! RMSNorm of a gated value in groups of features. With `û` the normalised value and `g = grad · w`, the gradient of the
//! value is `(g - û mean(g û)) / σ`.

use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};

use super::{add, dims, reshape, sigmoid, widen};
use crate::dtype::cast;
use crate::gated_norm::{GatedInputs, GatedNorm};
use crate::kernels::LocalKernels;

/// At least fp32, the features in their groups.
struct Wide<B: Backend> {
    x: FloatTensor<B>,
    gate: FloatTensor<B>,
    sigma: FloatTensor<B>,
    w: FloatTensor<B>,
    normed: FloatTensor<B>,
    /// `1 / √(mean + eps)` of each group.
    inverse: FloatTensor<B>,
}

impl<B: LocalKernels> Wide<B> {
    fn new(inputs: GatedInputs<B>, norm: GatedNorm) -> Self {
        let [x, gate] = [inputs.x, inputs.gate].map(|x| grouped::<B>(x, norm));
        let w = cast::<B>(inputs.w, x.dtype());
        let features = dims(&w)[0];
        let sigma = sigmoid::<B>(gate.clone());
        let value = B::float_mul(B::float_mul(gate.clone(), sigma.clone()), x.clone());
        let mean = B::mean_dim(B::float_mul(value.clone(), value.clone()), 2);
        let inverse = B::float_recip(B::float_sqrt(add::<B>(mean, norm.eps)));
        let w = reshape::<B>(w, [1, norm.groups, features / norm.groups]);
        Self { normed: B::float_mul(value, inverse.clone()), x, gate, sigma, w, inverse }
    }
}

/// `[s, b, features]` as `[s b, groups, ..]`, at least in fp32.
fn grouped<B: Backend>(x: FloatTensor<B>, norm: GatedNorm) -> FloatTensor<B> {
    let size = dims(&x);
    reshape::<B>(widen::<B>(x).0, [size[0] * size[1], norm.groups, size[2] / norm.groups])
}

pub fn forward<B: LocalKernels>(inputs: GatedInputs<B>, norm: GatedNorm) -> FloatTensor<B> {
    let (shape, dtype) = (dims(&inputs.x), inputs.x.dtype());
    let Wide { normed, w, .. } = Wide::<B>::new(inputs, norm);
    cast::<B>(reshape::<B>(B::float_mul(normed, w), shape), dtype)
}

/// Of x, of the gate, and of the weight.
pub fn grads<B: LocalKernels>(inputs: GatedInputs<B>, grad: FloatTensor<B>, norm: GatedNorm) -> [FloatTensor<B>; 3] {
    let (shape, dtype, of_w) = (dims(&inputs.x), inputs.x.dtype(), inputs.w.dtype());
    let grad = grouped::<B>(grad, norm);
    let Wide { x, gate, sigma, w, normed, inverse } = Wide::<B>::new(inputs, norm);
    let dw = B::sum_dim(B::float_mul(grad.clone(), normed.clone()), 0);
    let g = B::float_mul(grad, w);
    let along = B::float_mul(normed.clone(), B::mean_dim(B::float_mul(g.clone(), normed), 2));
    let value = B::float_mul(B::float_sub(g, along), inverse);
    // `silu'(z) = σ(z) (1 + z (1 - σ(z)))`.
    let slope = add::<B>(B::float_mul(gate.clone(), add::<B>(B::float_neg(sigma.clone()), 1.0)), 1.0);
    let d_gate = B::float_mul(B::float_mul(value.clone(), x), B::float_mul(sigma.clone(), slope));
    let dx = B::float_mul(value, B::float_mul(gate, sigma));
    let back = |x| cast::<B>(reshape::<B>(x, shape.clone()), dtype);
    [back(dx), back(d_gate), cast::<B>(reshape::<B>(dw, [shape[2]]), of_w)]
}
