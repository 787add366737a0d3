//! RMSNorm and LayerNorm. Gradients of weights and biases are f32: they are sums over all rows, and sums of gradients go on
//! in f32.

use burn::backend::{Cube, DType, TensorMetadata};
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::pointwise::{layer_norm, rms_norm};

use super::{Float, are_half, columns, empty, launched, packed, rows};
use crate::ops::{
    kernels::{NormGrads, NormNeeds},
    plain,
};

pub fn rms_forward(x: Float, w: Float, eps: f64) -> Float {
    if !are_half([&x, &w]) || !rms_norm::has_kernel(columns(&x)) {
        return plain::norm::rms_norm::<Cube>(x, w, eps);
    }
    let (x, w) = (packed(x), packed(w));
    let y = empty(&x, x.shape(), x.dtype());
    let (rows, columns) = (rows(&x), columns(&x));
    let inputs = (&x.handle, &w.handle);
    let done = by_half!(x, E => rms_norm::forward::<E>(&x.client, inputs, &y.handle, eps as f32, rows, columns));
    launched("rms_norm", done);
    y
}

pub fn rms_grads(x: Float, w: Float, grad: Float, eps: f64, needs: NormNeeds) -> NormGrads<Cube> {
    if !are_half([&x, &w, &grad]) || !rms_norm::has_kernel(columns(&x)) {
        return plain::norm::rms_norm_grads::<Cube>(x, w, grad, eps, needs);
    }
    let (x, w, grad) = (packed(x), packed(w), packed(grad));
    let (rows, columns) = (rows(&x), columns(&x));
    let (dx, dw) = (empty(&x, x.shape(), x.dtype()), empty(&w, [columns], DType::F32));
    let gradients = (&dx.handle, &dw.handle);
    let inputs = (&x.handle, &w.handle);
    let done = by_half!(x, E => {
        rms_norm::backward::<E>(&x.client, inputs, &grad.handle, gradients, eps as f32, rows, columns)
    });
    launched("rms_norm gradient", done);
    NormGrads { x: needs.x.then_some(dx), w: needs.w.then_some(dw), b: None }
}

pub fn layer_forward(x: Float, w: Float, b: Float, eps: f64) -> Float {
    if !are_half([&x, &w, &b]) || !layer_norm::has_kernel(columns(&x)) {
        return plain::norm::layer_norm::<Cube>(x, w, b, eps);
    }
    let (x, w, b) = (packed(x), packed(w), packed(b));
    let y = empty(&x, x.shape(), x.dtype());
    let (rows, columns, params) = (rows(&x), columns(&x), (&w.handle, &b.handle));
    let done = by_half!(x, E => {
        layer_norm::forward::<E>(&x.client, &x.handle, params, &y.handle, eps as f32, rows, columns)
    });
    launched("layer_norm", done);
    y
}

pub fn layer_grads(x: Float, w: Float, grad: Float, eps: f64, needs: NormNeeds) -> NormGrads<Cube> {
    if !are_half([&x, &w, &grad]) || !layer_norm::has_kernel(columns(&x)) {
        return plain::norm::layer_norm_grads::<Cube>(x, w, grad, eps, needs);
    }
    let (x, w, grad) = (packed(x), packed(w), packed(grad));
    let (rows, columns) = (rows(&x), columns(&x));
    let (dx, both) = (empty(&x, x.shape(), x.dtype()), empty(&w, [2, columns], DType::F32));
    let (inputs, gradients) = ((&x.handle, &w.handle), (&dx.handle, &both.handle));
    let done = by_half!(x, E => {
        layer_norm::backward::<E>(&x.client, inputs, &grad.handle, gradients, eps as f32, rows, columns)
    });
    launched("layer_norm gradient", done);
    let [dw, db] = two_rows(both);
    NormGrads { x: needs.x.then_some(dx), w: needs.w.then_some(dw), b: needs.b.then_some(db) }
}

/// The rows of `x [2, columns]`, f32 without gaps.
fn two_rows(x: CubeTensor) -> [CubeTensor; 2] {
    let columns = columns(&x);
    let bytes = (columns * size_of::<f32>()) as u64;
    [(0, bytes), (bytes, 0)].map(|(before, behind)| {
        let handle = x.handle.clone().offset_start(before).offset_end(behind);
        CubeTensor::new_contiguous(x.client.clone(), x.device.clone(), [columns].into(), handle, DType::F32)
    })
}
