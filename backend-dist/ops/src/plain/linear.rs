//! `x · wᵀ` over flattened leading dimensions, and biases.

use burn::backend::{Backend, tensor::FloatTensor};

use super::{dims, last, reshape, rows};

pub fn forward<B: Backend>(x: FloatTensor<B>, w: FloatTensor<B>) -> FloatTensor<B> {
    let mut shape = dims(&x);
    *shape.last_mut().expect("an input has features") = dims(&w)[0];
    reshape::<B>(B::float_matmul(rows::<B>(x), B::float_transpose(w)), shape)
}

pub fn input_grad<B: Backend>(grad: FloatTensor<B>, w: FloatTensor<B>) -> FloatTensor<B> {
    let mut shape = dims(&grad);
    *shape.last_mut().expect("an output has features") = dims(&w)[1];
    reshape::<B>(B::float_matmul(rows::<B>(grad), w), shape)
}

pub fn weight_grad<B: Backend>(grad: FloatTensor<B>, x: FloatTensor<B>) -> FloatTensor<B> {
    B::float_matmul(B::float_transpose(rows::<B>(grad)), rows::<B>(x))
}

pub fn add_bias<B: Backend>(y: FloatTensor<B>, b: FloatTensor<B>) -> FloatTensor<B> {
    let mut shape = vec![1; dims(&y).len()];
    *shape.last_mut().expect("an output has features") = last(&b);
    B::float_add(y, reshape::<B>(b, shape))
}

/// The sum over all dimensions but the last in one go, as Burn's own gradient of a broadcast addition.
pub fn bias_grad<B: Backend>(grad: FloatTensor<B>) -> FloatTensor<B> {
    let (shape, features) = (dims(&grad), last(&grad));
    let summed: Vec<usize> = (0..shape.len() - 1).filter(|&i| shape[i] != 1).collect();
    let sum = match summed[..] {
        [] => grad,
        [dim] => B::float_sum_dim(grad, dim),
        _ => B::float_sum_dims(grad, &summed),
    };
    reshape::<B>(sum, [features])
}
