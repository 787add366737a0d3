//! SwiGLU, GeGLU, GELU and squared ReLU.

use burn::backend::{Cube, TensorMetadata};
use kernels_cubecl::pointwise::activation::{self, Activation};
use kernels_cubecl::pointwise::gated::{self, Gating};

use super::{Float, are_half, columns, empty, launched, packed, rows};
use crate::{options::GeluKind, plain};

pub fn swiglu(x: Float) -> Float {
    glu(x, Gating::Silu, plain::activation::swiglu::<Cube>)
}

pub fn swiglu_grad(x: Float, grad: Float) -> Float {
    glu_grad(x, grad, Gating::Silu, plain::activation::swiglu_grad::<Cube>)
}

pub fn geglu(x: Float, kind: GeluKind) -> Float {
    glu(x, by_gelu(kind), |x| plain::activation::geglu::<Cube>(x, kind))
}

pub fn geglu_grad(x: Float, grad: Float, kind: GeluKind) -> Float {
    glu_grad(x, grad, by_gelu(kind), |x, grad| plain::activation::geglu_grad::<Cube>(x, grad, kind))
}

fn by_gelu(kind: GeluKind) -> Gating {
    match kind {
        GeluKind::Erf => Gating::Gelu,
        GeluKind::Tanh => Gating::GeluTanh,
    }
}

/// The gated linear unit of the halves of each row; `unfused` where there is no kernel.
fn glu(x: Float, gating: Gating, unfused: impl FnOnce(Float) -> Float) -> Float {
    let half = columns(&x) / 2;
    if !are_half([&x]) || !gated::has_kernel(half) {
        return unfused(x);
    }
    let x = packed(x);
    let mut shape = x.shape();
    *shape.last_mut().expect("a gated linear unit has a last dimension") = half;
    let out = empty(&x, shape, x.dtype());
    let done = by_half!(x, E => gated::forward::<E>(&x.client, &x.handle, &out.handle, rows(&x), half, gating));
    launched("gated linear unit", done);
    out
}

/// Gradient of [`glu`].
fn glu_grad(x: Float, grad: Float, gating: Gating, unfused: impl FnOnce(Float, Float) -> Float) -> Float {
    let half = columns(&x) / 2;
    if !are_half([&x, &grad]) || !gated::has_kernel(half) {
        return unfused(x, grad);
    }
    let (x, grad) = (packed(x), packed(grad));
    let dx = empty(&x, x.shape(), x.dtype());
    let done = by_half!(x, E => {
        gated::backward::<E>(&x.client, [&x.handle, &grad.handle, &dx.handle], rows(&x), half, gating)
    });
    launched("gradient of a gated linear unit", done);
    dx
}

pub fn gelu(x: Float, kind: GeluKind) -> Float {
    activated("gelu", x, gelu_of(kind), |x| plain::activation::gelu::<Cube>(x, kind))
}

pub fn gelu_grad(x: Float, grad: Float, kind: GeluKind) -> Float {
    activated_grad("gelu gradient", x, grad, gelu_of(kind), |x, grad| {
        plain::activation::gelu_grad::<Cube>(x, grad, kind)
    })
}

pub fn squared_relu(x: Float) -> Float {
    activated("squared relu", x, Activation::SquaredRelu, plain::activation::squared_relu::<Cube>)
}

pub fn squared_relu_grad(x: Float, grad: Float) -> Float {
    let unfused = plain::activation::squared_relu_grad::<Cube>;
    activated_grad("squared relu gradient", x, grad, Activation::SquaredRelu, unfused)
}

fn gelu_of(kind: GeluKind) -> Activation {
    match kind {
        GeluKind::Erf => Activation::Gelu,
        GeluKind::Tanh => Activation::GeluTanh,
    }
}

/// The activation of each element; `unfused` where there is no kernel.
fn activated(name: &str, x: Float, kind: Activation, unfused: impl FnOnce(Float) -> Float) -> Float {
    let len = x.shape().num_elements();
    if !are_half([&x]) || !activation::has_kernel(len) {
        return unfused(x);
    }
    let x = packed(x);
    let out = empty(&x, x.shape(), x.dtype());
    launched(name, by_half!(x, E => activation::forward::<E>(&x.client, &x.handle, &out.handle, len, kind)));
    out
}

/// Gradient of [`activated`].
fn activated_grad(
    name: &str,
    x: Float,
    grad: Float,
    kind: Activation,
    unfused: impl FnOnce(Float, Float) -> Float,
) -> Float {
    let len = x.shape().num_elements();
    if !are_half([&x, &grad]) || !activation::has_kernel(len) {
        return unfused(x, grad);
    }
    let (x, grad) = (packed(x), packed(grad));
    let dx = empty(&x, x.shape(), x.dtype());
    let tensors = [&x.handle, &grad.handle, &dx.handle];
    launched(name, by_half!(x, E => activation::backward::<E>(&x.client, tensors, len, kind)));
    dx
}
