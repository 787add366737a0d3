//! The operations on NVIDIA GPUs. Other types, odd sizes and other devices have no kernel here and use the formulas of
//! `plain`.

/// Runs `$body` with `$E` the element type of `$x`, for which [`are_half`] holds.
macro_rules! by_half {
    ($x:expr, $E:ident => $body:expr) => {
        if $x.dtype() == burn::backend::DType::F16 {
            type $E = half::f16;
            $body
        } else {
            type $E = half::bf16;
            $body
        }
    };
}

/// The same with fp32 too, for which [`are_floats`] holds.
macro_rules! by_float {
    ($x:expr, $E:ident => $body:expr) => {
        if $x.dtype() == burn::backend::DType::F32 {
            type $E = f32;
            $body
        } else {
            by_half!($x, $E => $body)
        }
    };
}

mod accumulate;
mod activation;
mod attention;
mod attention_parts;
mod biases;
mod blocks;
mod blockwise;
mod context;
mod convolution;
mod cross_entropy;
mod decode;
mod dma_collectives;
mod dma_overlap;
mod draw;
mod dropout;
mod embedding;
mod factors;
mod few_rows;
mod fp8;
mod fp8_groups;
mod gated_delta;
mod gated_norm;
mod gemm;
pub(super) mod grouped;
mod head_norms;
mod latent;
mod linear;
mod local_kernels;
mod low_rank;
mod masked_attention;
mod moe;
mod norm;
mod reductions;
mod rope;
pub(crate) mod routing;
mod row_biases;
mod sinks;
mod small_matrix;
mod softmax;
mod split;
mod ssd;
mod token_all_to_all;
mod work;

use burn::backend::ops::IntTensorOps;
use burn::backend::{
    Cube, DType, IntDType, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::Shape;
use burn_cubecl::kernel::{copy_contiguous, into_contiguous};
use burn_cubecl::tensor::CubeTensor;
pub use dma_collectives::{begin_gather, collective_by_dma, gemm_and_collective, gemm_of_arriving};
pub use dma_overlap::Arriving;
use gpu::cuda::packed_rows;
pub use small_matrix::times_small_matrix;

type Float = FloatTensor<Cube>;
type Int = IntTensor<Cube>;

/// Bytes of the longest vector access of the kernels: eight f32.
const ALIGNMENT: u64 = 32;

/// Size of the last dimension.
fn columns(x: &CubeTensor) -> usize {
    x.meta.shape().last().copied().unwrap_or(1)
}

/// Number of matrix rows: all dimensions but the last.
fn rows(x: &CubeTensor) -> usize {
    x.meta.shape().num_elements() / columns(x).max(1)
}

/// Whether `x` is not empty and on an NVIDIA GPU.
fn is_here(x: &CubeTensor) -> bool {
    matches!(x.device, cubecl::Device::Cuda(_)) && x.meta.shape().num_elements() > 0
}

/// Whether all have the same half-precision type, and the first is not empty and on an NVIDIA GPU.
fn are_half<const N: usize>(tensors: [&CubeTensor; N]) -> bool {
    let dtype = tensors[0].dtype();
    let is_half = matches!(dtype, DType::BF16 | DType::F16);
    is_here(tensors[0]) && is_half && tensors.iter().all(|x| x.dtype() == dtype)
}

/// As [`are_half`], or all fp32.
fn are_floats<const N: usize>(tensors: [&CubeTensor; N]) -> bool {
    are_half(tensors) || is_here(tensors[0]) && tensors.iter().all(|x| x.dtype() == DType::F32)
}

/// Ids in the layout of the kernels: contiguous i32.
fn ids(x: Int) -> CubeTensor {
    packed(Cube::int_cast(x, IntDType::I32))
}

/// Whether vector accesses may start at the tensor's start.
fn is_aligned(x: &CubeTensor) -> bool {
    x.handle.offset_start.unwrap_or(0).is_multiple_of(ALIGNMENT)
}

/// `x` contiguous from an aligned address on: in place, else a copy.
pub fn packed(x: CubeTensor) -> CubeTensor {
    match packed_rows(&x) {
        Some(packed) => packed,
        None if is_aligned(&x) => into_contiguous(x),
        None => copy_contiguous(x),
    }
}

/// `x` for a kernel that writes over it: itself, or a copy where something else holds it, which may be no more than a
/// collective that CubeCL's thread has yet to queue. That is a matter of time and must not decide how often a sum is
/// rounded.
fn writable(x: CubeTensor) -> CubeTensor {
    let x = packed(x);
    if x.can_mut() { x } else { copy_contiguous(x) }
}

/// An uninitialised contiguous tensor on the device of `x`.
fn empty(x: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    gpu::cuda::empty(x, shape.into(), dtype)
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

/// The fp32 numbers from `first` on as a tensor of this shape.
fn part(x: &CubeTensor, first: usize, shape: impl Into<Shape>) -> CubeTensor {
    let (size, shape) = (size_of::<f32>(), shape.into());
    let behind = x.meta.shape().num_elements() - first - shape.num_elements();
    let handle = x.handle.clone().offset_start((first * size) as u64).offset_end((behind * size) as u64);
    CubeTensor::new_contiguous(x.client.clone(), x.device.clone(), shape, handle, DType::F32)
}

/// The shape of `x` with another last dimension.
fn with_last(x: &CubeTensor, last: usize) -> Shape {
    let mut shape = x.meta.shape().to_vec();
    *shape.last_mut().expect("a linear operand has features") = last;
    Shape::from(shape)
}
