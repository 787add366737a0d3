//! SwiGLU.

use burn::backend::{Cube, TensorMetadata};
use kernels_cubecl::pointwise::swiglu as kernels;

use super::{Float, are_bf16, columns, empty, launched, packed, rows};
use crate::ops::plain;

pub fn swiglu(x: Float) -> Float {
    let half = columns(&x) / 2;
    if !are_bf16([&x]) || !kernels::has_kernel(half) {
        return plain::activation::swiglu::<Cube>(x);
    }
    let x = packed(x);
    let mut shape = x.shape();
    *shape.last_mut().expect("swiglu has a last dimension") = half;
    let out = empty(&x, shape, x.dtype());
    launched("swiglu", kernels::forward(&x.client, &x.handle, &out.handle, rows(&x), half));
    out
}

pub fn swiglu_grad(x: Float, grad: Float) -> Float {
    let half = columns(&x) / 2;
    if !are_bf16([&x, &grad]) || !kernels::has_kernel(half) {
        return plain::activation::swiglu_grad::<Cube>(x, grad);
    }
    let (x, grad) = (packed(x), packed(grad));
    let dx = empty(&x, x.shape(), x.dtype());
    let done = kernels::backward(&x.client, &x.handle, &grad.handle, &dx.handle, rows(&x), half);
    launched("swiglu gradient", done);
    dx
}
