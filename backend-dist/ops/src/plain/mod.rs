//! The operations as formulas in Burn's primitives, for any backend: the defaults of all kernels, and the references of
//! the CPU backend's loops. Norms and softmax compute at least in f32.

pub(super) mod activation;
pub(super) mod attention;
pub(super) mod convolution;
pub(super) mod cross_entropy;
pub(super) mod dropout;
pub(super) mod embedding;
mod gated_delta;
pub(super) mod gated_norm;
pub(super) mod linear;
pub(super) mod masked_attention;
pub(super) mod norm;
pub(super) mod rope;
pub(super) mod ssd;

use burn::backend::{Backend, DType, Scalar, Shape, Slice, TensorMetadata, tensor::FloatTensor};

use crate::dtype::{cast, wide};

fn dims<T: TensorMetadata>(x: &T) -> Vec<usize> {
    x.shape().to_vec()
}

fn last<T: TensorMetadata>(x: &T) -> usize {
    *dims(x).last().expect("operations need at least one dimension")
}

fn reshape<B: Backend>(x: FloatTensor<B>, shape: impl Into<Vec<usize>>) -> FloatTensor<B> {
    B::float_reshape(x, Shape::from(shape.into()))
}

/// All leading dimensions as one: `[.., n]` to `[rows, n]`.
fn rows<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let n = last(&x);
    let all: usize = dims(&x).iter().product();
    reshape::<B>(x, [all / n.max(1), n])
}

/// Half precision widened to f32, and the original type.
fn widen<B: Backend>(x: FloatTensor<B>) -> (FloatTensor<B>, DType) {
    let dtype = x.dtype();
    (cast::<B>(x, wide(dtype)), dtype)
}

fn sigmoid<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    B::float_recip(add::<B>(B::float_exp(B::float_neg(x)), 1.0))
}

fn add<B: Backend>(x: FloatTensor<B>, value: f64) -> FloatTensor<B> {
    B::float_add_scalar(x, Scalar::Float(value))
}

fn scale<B: Backend>(x: FloatTensor<B>, factor: f64) -> FloatTensor<B> {
    B::float_mul_scalar(x, Scalar::Float(factor))
}

/// Elements `from..to` of dimension `dim`.
pub fn narrow<B: Backend>(x: FloatTensor<B>, dim: usize, from: usize, to: usize) -> FloatTensor<B> {
    let slices: Vec<Slice> = dims(&x)
        .into_iter()
        .enumerate()
        .map(|(i, n)| if i == dim { Slice::from(from..to) } else { Slice::from(0..n) })
        .collect();
    B::float_slice(x, &slices)
}
