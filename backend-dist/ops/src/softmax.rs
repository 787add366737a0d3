//! `x / (Σ x + eps)`, and softmax, which is the same of exponentials.

use burn::backend::{Flex, Scalar, TensorMetadata, tensor::FloatTensor as Float};
use burn::tensor::Tensor;

use super::{
    kernels::LocalKernels,
    operation::{apply, operation},
};

/// `x / (Σ x + eps)` with sums over the last dimension.
pub fn normalize_sum<const D: usize>(x: Tensor<D>, eps: f64) -> Tensor<D> {
    apply(Normalize { normalizer: Normalizer::Sum { eps } }, [x.into_dispatch()])
}

/// Softmax over the last dimension.
pub fn softmax<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    apply(Normalize { normalizer: Normalizer::Softmax }, [x.into_dispatch()])
}

/// The numbers that are divided by their sum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Normalizer {
    /// The elements; `eps` is added to their sum.
    Sum {
        /// Avoids a division by zero.
        eps: f64,
    },
    /// `exp(x - max x)`.
    Softmax,
}

/// The kernels of [`normalize_sum`] and [`softmax`].
pub trait NormalizeKernels: LocalKernels {
    /// The normalised numbers and the sums, which have 1 in the last dimension.
    fn normalize(x: Float<Self>, normalizer: Normalizer) -> [Float<Self>; 2] {
        plain_normalize::<Self>(x, normalizer)
    }

    /// The gradient of `x` from the `[output, sum]` of [`normalize`](Self::normalize).
    fn normalize_grad(saved: [Float<Self>; 2], grad: Float<Self>, normalizer: Normalizer) -> Float<Self> {
        plain_grad::<Self>(saved, grad, normalizer)
    }
}

impl NormalizeKernels for Flex {}

fn last(x: &impl TensorMetadata) -> usize {
    x.shape().num_dims() - 1
}

pub fn plain_normalize<B: LocalKernels>(x: Float<B>, normalizer: Normalizer) -> [Float<B>; 2] {
    let dim = last(&x);
    let (x, eps) = match normalizer {
        Normalizer::Sum { eps } => (x, eps),
        Normalizer::Softmax => (B::float_exp(B::float_sub(x.clone(), B::float_max_dim(x, dim))), 0.0),
    };
    let total = B::float_add_scalar(B::sum_dim(x.clone(), dim), Scalar::Float(eps));
    [B::float_div(x, total.clone()), total]
}

/// With `y = x / t`: `dx = (dy - Σ dy y) / t`, and with `x = exp z`: `dz = (dy - Σ dy y) y`.
pub fn plain_grad<B: LocalKernels>([y, total]: [Float<B>; 2], grad: Float<B>, normalizer: Normalizer) -> Float<B> {
    let dim = last(&y);
    let along = B::sum_dim(B::float_mul(grad.clone(), y.clone()), dim);
    let slope = B::float_sub(grad, along);
    match normalizer {
        Normalizer::Sum { .. } => B::float_div(slope, total),
        Normalizer::Softmax => B::float_mul(slope, y),
    }
}

operation! {
    Normalize { normalizer: Normalizer }, 1, ([Float<B>; 2], Normalizer),
    |[x], _, _| {
        let [y, total] = B::normalize(x, normalizer);
        (y.clone(), Some(([y, total], normalizer)))
    },
    |(saved, normalizer), grad, parents| parents.register::<B>([B::normalize_grad(saved, grad, normalizer)]),
}
