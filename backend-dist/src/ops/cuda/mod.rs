//! The operations on NVIDIA GPUs. What has no kernel here is computed by the formulas of `plain`.

mod linear;

use burn::backend::{Cube, tensor::FloatTensor};

use super::kernels::LocalKernels;

impl LocalKernels for Cube {
    fn matmul(a: FloatTensor<Self>, b: FloatTensor<Self>) -> FloatTensor<Self> {
        linear::matmul(a, b)
    }

    fn linear_forward(x: FloatTensor<Self>, w: FloatTensor<Self>) -> FloatTensor<Self> {
        linear::forward(x, w)
    }

    fn linear_input_grad(grad: FloatTensor<Self>, w: FloatTensor<Self>) -> FloatTensor<Self> {
        linear::input_grad(grad, w)
    }

    fn linear_weight_grad(grad: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        linear::weight_grad(grad, x)
    }
}
