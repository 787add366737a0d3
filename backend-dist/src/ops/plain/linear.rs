//! `x · wᵀ` over flattened leading dimensions.

use burn::backend::{Backend, tensor::FloatTensor};

use super::{dims, reshape, rows};

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
