//! RMSNorm.

use burn::backend::{Cube, DType, TensorMetadata};
use kernels_cubecl::pointwise::rms_norm;

use super::{Float, are_bf16, columns, empty, launched, packed, rows};
use crate::ops::{
    kernels::{NormGrads, NormNeeds},
    plain,
};

pub fn rms_forward(x: Float, w: Float, eps: f64) -> Float {
    if !are_bf16([&x, &w]) || !rms_norm::has_kernel(columns(&x)) {
        return plain::norm::rms_norm::<Cube>(x, w, eps);
    }
    let (x, w) = (packed(x), packed(w));
    let y = empty(&x, x.shape(), x.dtype());
    let (rows, columns) = (rows(&x), columns(&x));
    let done = rms_norm::forward(&x.client, (&x.handle, &w.handle), &y.handle, eps as f32, rows, columns);
    launched("rms_norm", done);
    y
}

/// The gradient of `w` is f32: it is a sum over all rows, and sums of gradients go on in f32.
pub fn rms_grads(x: Float, w: Float, grad: Float, eps: f64, needs: NormNeeds) -> NormGrads<Cube> {
    if !are_bf16([&x, &w, &grad]) || !rms_norm::has_kernel(columns(&x)) {
        return plain::norm::rms_norm_grads::<Cube>(x, w, grad, eps, needs);
    }
    let (x, w, grad) = (packed(x), packed(w), packed(grad));
    let (rows, columns) = (rows(&x), columns(&x));
    let (dx, dw) = (empty(&x, x.shape(), x.dtype()), empty(&w, [columns], DType::F32));
    let gradients = (&dx.handle, &dw.handle);
    let inputs = (&x.handle, &w.handle);
    let done = rms_norm::backward(&x.client, inputs, &grad.handle, gradients, eps as f32, rows, columns);
    launched("rms_norm gradient", done);
    NormGrads { x: needs.x.then_some(dx), w: needs.w.then_some(dw), b: None }
}
