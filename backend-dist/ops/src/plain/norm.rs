//! RMSNorm and LayerNorm. With `x̂` the normalised row and `g = grad · w`, both gradients are
//! `dx = (g - [mean(g)] - x̂ mean(g x̂)) / σ`, where only LayerNorm has the bracket.

use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor as Float};

use super::{add, dims, last, reshape, rows, widen};
use crate::dtype::cast;
use crate::kernels::{LocalKernels, NormGrads, NormNeeds};
use crate::options::Rms;

/// The normalised rows and `1/σ` of every row, `[rows, n]` and `[rows, 1]`.
fn normalise<B: LocalKernels>(x: Float<B>, eps: f64, center: bool) -> [Float<B>; 2] {
    let x = rows::<B>(x);
    let x = if center { B::float_sub(x.clone(), B::mean_dim(x, 1)) } else { x };
    let square = B::mean_dim(B::float_mul(x.clone(), x.clone()), 1);
    let inverse = B::float_recip(B::float_sqrt(add::<B>(square, eps)));
    [B::float_mul(x, inverse.clone()), inverse]
}

/// A vector as one matrix row, in the type of `like`.
fn row<B: Backend>(w: Float<B>, like: &Float<B>) -> Float<B> {
    let n = last(&w);
    cast::<B>(reshape::<B>(w, [1, n]), like.dtype())
}

/// What the rows are multiplied with, in the type of `like`.
fn multiplier<B: Backend>(w: Float<B>, norm: Rms, like: &Float<B>) -> Float<B> {
    let w = row::<B>(w, like);
    if norm.plus_one { add::<B>(w, 1.0) } else { w }
}

pub fn rms_norm<B: LocalKernels>(x: Float<B>, w: Float<B>, norm: Rms) -> Float<B> {
    let shape = dims(&x);
    let (x, dtype) = widen::<B>(x);
    let [x, _] = normalise::<B>(x, norm.eps, false);
    let w = multiplier::<B>(w, norm, &x);
    cast::<B>(reshape::<B>(B::float_mul(x, w), shape), dtype)
}

pub fn layer_norm<B: LocalKernels>(x: Float<B>, w: Float<B>, b: Float<B>, eps: f64) -> Float<B> {
    let shape = dims(&x);
    let (x, dtype) = widen::<B>(x);
    let [x, _] = normalise::<B>(x, eps, true);
    let (w, b) = (row::<B>(w, &x), row::<B>(b, &x));
    cast::<B>(reshape::<B>(B::float_add(B::float_mul(x, w), b), shape), dtype)
}

pub fn rms_norm_grads<B: LocalKernels>(
    x: Float<B>,
    w: Float<B>,
    grad: Float<B>,
    norm: Rms,
    needs: NormNeeds,
) -> NormGrads<B> {
    grads::<B>(x, w, grad, norm, NormNeeds { b: false, ..needs }, false)
}

pub fn layer_norm_grads<B: LocalKernels>(
    x: Float<B>,
    w: Float<B>,
    grad: Float<B>,
    eps: f64,
    needs: NormNeeds,
) -> NormGrads<B> {
    grads::<B>(x, w, grad, eps.into(), needs, true)
}

fn grads<B: LocalKernels>(
    x: Float<B>,
    w: Float<B>,
    grad: Float<B>,
    norm: Rms,
    needs: NormNeeds,
    center: bool,
) -> NormGrads<B> {
    let shape = dims(&x);
    let n = last(&x);
    let (x, dtype) = widen::<B>(x);
    let grad = rows::<B>(widen::<B>(grad).0);
    let [x, inverse] = normalise::<B>(x, norm.eps, center);
    let over_rows = |t: Float<B>| cast::<B>(reshape::<B>(B::sum_dim(t, 0), [n]), dtype);
    NormGrads {
        w: needs.w.then(|| over_rows(B::float_mul(grad.clone(), x.clone()))),
        b: needs.b.then(|| over_rows(grad.clone())),
        x: needs.x.then(|| {
            let w = multiplier::<B>(w, norm, &x);
            let g = B::float_mul(grad, w);
            let along = B::float_mul(x.clone(), B::mean_dim(B::float_mul(g.clone(), x), 1));
            let mean = center.then(|| B::mean_dim(g.clone(), 1));
            let g = B::float_sub(g, along);
            let g = match mean {
                Some(mean) => B::float_sub(g, mean),
                None => g,
            };
            cast::<B>(reshape::<B>(B::float_mul(g, inverse), shape), dtype)
        }),
    }
}
