//! GEMMs, all by cuBLASLt on operands in place, and biases.
//!
//! The GEMM adds a bias (`CUBLASLT_EPILOGUE_BIAS`), but computes no activation: a GEMM with GELU's epilogue would write
//! activation and pre-activation (for `DGELU_BGRAD`) and tie two layers together. The fused kernel before the next GEMM
//! instead reads the pre-activation, which is saved anyway, in one pass.

use burn::backend::{Cube, DType, FloatDType, TensorMetadata, ops::FloatTensorOps};
use burn::tensor::Shape;
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::pointwise::column_sum;

use super::{
    Float, are_half, columns, empty, few_rows, launched, low_rank, packed, reductions::sum_dim, rows, with_last,
    writable,
};
use crate::plain;
use gpu::cuda::lt::{Mixed, Onto, Operand, gemm, gemm_and_bias, gemm_mixed, multiply};

/// Rows up to which a kernel of ours reads the weight faster than cuBLASLt.
pub(super) const FEW: usize = 4;

/// `[.., m, k] · [.., k, n]`.
pub fn matmul(a: Float, b: Float) -> Float {
    let (left, right) = (a.meta.shape().to_vec(), b.meta.shape().to_vec());
    let lead = left.len() - 2;
    assert_eq!(left[..lead], right[..lead], "GEMM: {left:?} · {right:?} are batches of different sizes");
    let mut shape = left;
    shape[lead + 1] = right[lead + 1];
    let dtype = a.dtype;
    gemm(Operand::batched(a), Operand::batched(b), Shape::from(shape), dtype)
}

/// With `c` in the GEMM's epilogue.
pub fn matmul_mixed(a: Float, b: Float, mixed: Mixed) -> Float {
    let [a, b] = if mixed.left { [packed(a), b] } else { [a, packed(b)] };
    gemm_mixed(a, b, mixed)
}

pub fn forward(x: Float, w: Float) -> Float {
    if rows(&x) <= FEW
        && let Some(y) = few_rows::dense(&x, &w)
    {
        return y;
    }
    let (shape, dtype) = (with_last(&x, w.meta.shape()[0]), x.dtype);
    gemm(Operand::flat(x), Operand::flat(w).transposed(), shape, dtype)
}

/// cuBLASLt adds the bias in f32 before rounding. It has no such GEMM in f64; for a single row or feature the bias is
/// added separately, as in PyTorch's `addmm` (`aten/src/ATen/native/cuda/Blas.cpp`).
pub fn bias_forward(x: Float, w: Float, b: Float) -> Float {
    let dtype = x.dtype;
    if !adds_bias(&x, &w, &b) {
        return plain::linear::add_bias::<Cube>(forward(x, w), b);
    }
    let shape = with_last(&x, w.meta.shape()[0]);
    gemm_and_bias(Operand::flat(x), Operand::flat(w).transposed(), packed(b), shape, dtype)
}

pub fn add_forward(y: Float, x: Float, w: Float) -> Float {
    if y.dtype != x.dtype {
        return Cube::float_add(y, forward(x, w));
    }
    let y = writable(y);
    if !low_rank::add(&y, &x, &w, true) {
        multiply(Operand::flat(x), Operand::flat(w).transposed(), &y, Onto::Add);
    }
    y
}

pub fn add_input_grad(sum: Float, grad: Float, w: Float) -> Float {
    if sum.dtype != grad.dtype {
        return Cube::float_add(sum, input_grad(grad, w));
    }
    let sum = writable(sum);
    if !low_rank::add(&sum, &grad, &w, false) {
        multiply(Operand::flat(grad), Operand::flat(w), &sum, Onto::Add);
    }
    sum
}

/// Whether cuBLASLt adds `b` to the GEMM of `x` and `w`.
pub fn adds_bias(x: &CubeTensor, w: &CubeTensor, b: &CubeTensor) -> bool {
    let same = w.dtype == x.dtype && b.dtype == x.dtype && x.dtype != DType::F64;
    same && rows(x) >= 2 && w.meta.shape().iter().all(|&n| n >= 2)
}

/// In f32 for half precision types.
pub fn bias_grad(grad: Float) -> Float {
    let (rows, columns) = (rows(&grad), columns(&grad));
    if !are_half([&grad]) || !column_sum::has_kernel(rows, columns) {
        let wide = if grad.dtype() == DType::F64 { FloatDType::F64 } else { FloatDType::F32 };
        let grad = Cube::float_reshape(Cube::float_cast(grad, wide), Shape::from([rows, columns]));
        return Cube::float_reshape(sum_dim(grad, 0), Shape::from([columns]));
    }
    let grad = packed(grad);
    let sum = empty(&grad, [columns], DType::F32);
    let done = by_half!(grad, E => column_sum::column_sum::<E>(&grad.client, &grad.handle, &sum.handle, rows, columns));
    launched("gradient of a bias", done);
    sum
}

pub fn input_grad(grad: Float, w: Float) -> Float {
    let (shape, dtype) = (with_last(&grad, w.meta.shape()[1]), grad.dtype);
    gemm(Operand::flat(grad), Operand::flat(w), shape, dtype)
}

pub fn weight_grad(grad: Float, x: Float) -> Float {
    let dtype = x.dtype;
    let (grad, x) = (Operand::flat(grad).transposed(), Operand::flat(x));
    let shape = Shape::from([grad.rows(), x.columns()]);
    gemm(grad, x, shape, dtype)
}

/// cuBLASLt adds the GEMM to `sum` in f32, in place.
pub fn accumulate_weight_grad(grad: Float, x: Float, sum: &CubeTensor, add: bool) {
    let onto = if add { Onto::Add } else { Onto::Replace };
    multiply(Operand::flat(grad).transposed(), Operand::flat(x), sum, onto);
}
