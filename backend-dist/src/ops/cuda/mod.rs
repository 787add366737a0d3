//! The operations on NVIDIA GPUs. What has no kernel here (other types, odd sizes, other devices) is computed by the
//! formulas of `plain`.

mod activation;
mod attention;
mod linear;
mod norm;

use burn::backend::{Cube, DType, TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;
use burn_cubecl::kernel::{copy_contiguous, into_contiguous};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;

use super::kernels::{LocalKernels, NormGrads, NormNeeds};
use super::options::{AttentionOptions, PackedHeads};

type Float = FloatTensor<Cube>;

/// What a vector access of the kernels needs.
const ALIGNMENT: u64 = 16;

impl LocalKernels for Cube {
    fn matmul(a: Float, b: Float) -> Float {
        linear::matmul(a, b)
    }

    fn linear_forward(x: Float, w: Float) -> Float {
        linear::forward(x, w)
    }

    fn linear_input_grad(grad: Float, w: Float) -> Float {
        linear::input_grad(grad, w)
    }

    fn linear_weight_grad(grad: Float, x: Float) -> Float {
        linear::weight_grad(grad, x)
    }

    fn rms_norm_forward(x: Float, w: Float, eps: f64) -> Float {
        norm::rms_forward(x, w, eps)
    }

    fn rms_norm_grads(x: Float, w: Float, grad: Float, eps: f64, needs: NormNeeds) -> NormGrads<Self> {
        norm::rms_grads(x, w, grad, eps, needs)
    }

    fn swiglu_forward(x: Float) -> Float {
        activation::swiglu(x)
    }

    fn swiglu_grad(x: Float, grad: Float) -> Float {
        activation::swiglu_grad(x, grad)
    }

    fn attention_forward(q: Float, k: Float, v: Float, options: AttentionOptions) -> (Float, Float) {
        attention::forward([q, k, v], options)
    }

    fn attention_grads(qkv: [Float; 3], result: [Float; 2], grad: Float, options: AttentionOptions) -> [Float; 3] {
        attention::grads(qkv, result, grad, options)
    }

    fn attention_packed_forward(qkv: Float, heads: PackedHeads, options: AttentionOptions) -> (Float, Float) {
        attention::packed_forward(qkv, heads, options)
    }

    fn attention_packed_grad(
        qkv: Float,
        result: [Float; 2],
        grad: Float,
        heads: PackedHeads,
        options: AttentionOptions,
    ) -> Float {
        attention::packed_grad(qkv, result, grad, heads, options)
    }
}

/// Size of the last dimension.
fn columns(x: &CubeTensor) -> usize {
    x.meta.shape().last().copied().unwrap_or(1)
}

/// Number of rows, all dimensions but the last.
fn rows(x: &CubeTensor) -> usize {
    x.meta.shape().num_elements() / columns(x).max(1)
}

/// Whether all are bf16 on an NVIDIA GPU and `x`, the first, has elements.
fn are_bf16<const N: usize>(tensors: [&CubeTensor; N]) -> bool {
    matches!(tensors[0].device, cubecl::Device::Cuda(_))
        && tensors.iter().all(|x| x.dtype() == DType::BF16)
        && tensors[0].meta.shape().num_elements() > 0
}

/// Whether vector accesses may start where the tensor starts.
fn is_aligned(x: &CubeTensor) -> bool {
    x.handle.offset_start.unwrap_or(0).is_multiple_of(ALIGNMENT)
}

/// `x` in rows without gaps from an aligned address on: as it is, else a copy.
fn packed(x: CubeTensor) -> CubeTensor {
    if is_aligned(&x) { into_contiguous(x) } else { copy_contiguous(x) }
}

/// An uninitialised tensor without gaps on the device of `x`.
fn empty(x: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(x.client.clone(), x.device.clone(), shape.into(), dtype)
}

/// Unwraps the result of a launch whose sizes were checked before.
///
/// # Panics
/// If the kernel refused them.
fn launched<E: std::fmt::Display>(operation: &str, result: Result<(), E>) {
    if let Err(error) = result {
        panic!("{operation} on CUDA: {error}");
    }
}
