//! Matrix products.

use burn::backend::{Cube, tensor::FloatTensor};

use crate::ops::plain;

type Float = FloatTensor<Cube>;

pub fn forward(x: Float, w: Float) -> Float {
    plain::linear::forward::<Cube>(x, w)
}

pub fn input_grad(grad: Float, w: Float) -> Float {
    plain::linear::input_grad::<Cube>(grad, w)
}

pub fn weight_grad(grad: Float, x: Float) -> Float {
    plain::linear::weight_grad::<Cube>(grad, x)
}
