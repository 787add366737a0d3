//! RMSNorm and LayerNorm. Gradients of weights and biases are f32: they are sums over all rows, and sums of gradients go on
//! in f32.

use burn::backend::{Cube, DType, TensorMetadata};
use burn_cubecl::tensor::CubeTensor;
use cubecl::server::Handle;
use kernels_cubecl::pointwise::norm::{self, Affine, Gradients, NormShape};

use super::{Float, are_half, columns, empty, launched, packed, rows};
use crate::ops::{
    kernels::{NormGrads, NormNeeds},
    plain,
};

pub fn rms_forward(x: Float, w: Float, eps: f64) -> Float {
    if !are_half([&x, &w]) || !Affine::Rms(&w.handle).has_kernel(columns(&x)) {
        return plain::norm::rms_norm::<Cube>(x, w, eps);
    }
    let w = packed(w);
    forward(x, Affine::Rms(&w.handle), eps)
}

pub fn rms_grads(x: Float, w: Float, grad: Float, eps: f64, needs: NormNeeds) -> NormGrads<Cube> {
    if !are_half([&x, &w, &grad]) || !Affine::Rms(&w.handle).has_kernel(columns(&x)) {
        return plain::norm::rms_norm_grads::<Cube>(x, w, grad, eps, needs);
    }
    let w = packed(w);
    let dw = empty(&w, [columns(&x)], DType::F32);
    let dx = backward(x, Affine::Rms(&w.handle), grad, &dw.handle, eps);
    NormGrads { x: needs.x.then_some(dx), w: needs.w.then_some(dw), b: None }
}

pub fn layer_forward(x: Float, w: Float, b: Float, eps: f64) -> Float {
    if !are_half([&x, &w, &b]) || !Affine::Layer(&w.handle, &b.handle).has_kernel(columns(&x)) {
        return plain::norm::layer_norm::<Cube>(x, w, b, eps);
    }
    let (w, b) = (packed(w), packed(b));
    forward(x, Affine::Layer(&w.handle, &b.handle), eps)
}

pub fn layer_grads(x: Float, w: Float, grad: Float, eps: f64, needs: NormNeeds) -> NormGrads<Cube> {
    // The gradients do not need the bias.
    if !are_half([&x, &w, &grad]) || !Affine::Layer(&w.handle, &w.handle).has_kernel(columns(&x)) {
        return plain::norm::layer_norm_grads::<Cube>(x, w, grad, eps, needs);
    }
    let w = packed(w);
    let both = empty(&w, [2, columns(&x)], DType::F32);
    let dx = backward(x, Affine::Layer(&w.handle, &w.handle), grad, &both.handle, eps);
    let [dw, db] = two_rows(both);
    NormGrads { x: needs.x.then_some(dx), w: needs.w.then_some(dw), b: needs.b.then_some(db) }
}

fn forward(x: Float, affine: Affine, eps: f64) -> Float {
    let x = packed(x);
    let (y, shape) = (empty(&x, x.shape(), x.dtype()), NormShape { rows: rows(&x), columns: columns(&x) });
    let done = by_half!(x, E => norm::forward::<E>(&x.client, &x.handle, None, affine, &y.handle, eps as f32, shape));
    launched("norm", done);
    y
}

/// The gradient of `x`; those of the weights are written to `sums`.
fn backward(x: Float, affine: Affine, grad: Float, sums: &Handle, eps: f64) -> Float {
    let (x, grad) = (packed(x), packed(grad));
    let (dx, shape) = (empty(&x, x.shape(), x.dtype()), NormShape { rows: rows(&x), columns: columns(&x) });
    let gradients = Gradients { x: &dx.handle, affine: sums };
    let done = by_half!(x, E => {
        norm::backward::<E>(&x.client, &x.handle, affine, &grad.handle, None, gradients, eps as f32, shape)
    });
    launched("norm gradient", done);
    dx
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
