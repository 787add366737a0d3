//! What FP8 linear layers need of a backend.

use burn::backend::{DType, Shape, tensor::FloatTensor};

use burn::tensor::Tensor;

use super::recipe::Number;
use crate::comm::Group;
use crate::exchange::ExchangeOps;
use crate::ops::kernels::LocalKernels;

/// The scale of a cast and its reciprocal, `[1]` each, of groups `[groups]`: f32, on CPU ranks f64 for f64.
#[derive(Clone, Debug)]
pub struct Scales<B: LocalKernels> {
    /// What is multiplied before the cast.
    pub scale: FloatTensor<B>,
    /// What is multiplied behind the product.
    pub inverse: FloatTensor<B>,
}

/// A quantised matrix with the summed dimension contiguous.
#[derive(Clone, Debug)]
pub struct Matrix<B: LocalKernels> {
    /// The numbers, in the backend's own form: bytes on CUDA, floats on the FP8 grid on the CPU.
    pub data: FloatTensor<B>,
    /// Rows.
    pub rows: usize,
    /// The dimension that a product sums over.
    pub inner: usize,
    /// The reciprocal of the scale.
    pub inverse: FloatTensor<B>,
    /// Which numbers.
    pub number: Number,
}

/// A tensor `[.., columns]`, quantised.
#[derive(Clone, Debug)]
pub struct Quantized<B: LocalKernels> {
    /// `[rows, columns]`.
    pub by_rows: Option<Matrix<B>>,
    /// `[columns, rows]`.
    pub by_columns: Option<Matrix<B>>,
}

/// Which forms of a quantised tensor are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sides {
    /// As it lies.
    pub by_rows: bool,
    /// The transpose.
    pub by_columns: bool,
}

/// How an FP8 product is summed up on the GPU (Transformer Engine's `use_split_accumulator`, which its recipes set for
/// gradients only).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// In the tensor core's own accumulator.
    Fast,
    /// In f32.
    Full,
}

/// Casts to FP8 and products of the results. A cast is `round(x · scale)` to nearest even; what is larger than the
/// largest number becomes that number, NaN stays.
pub trait Fp8Kernels: LocalKernels + ExchangeOps {
    /// The tensor as the public one.
    fn fp8_tensor(x: FloatTensor<Self>) -> Tensor<1>;

    /// The tensor of [`fp8_tensor`](Self::fp8_tensor).
    fn fp8_primitive(x: Tensor<1>) -> FloatTensor<Self>;

    /// The largest magnitude, `[1]`; 0 of an empty tensor.
    fn fp8_amax(x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// `max / amax / 2^margin` and its reciprocal for each number of `amax [n]`; 1 where it is 0 or not finite.
    fn fp8_scales(amax: FloatTensor<Self>, number: Number, margin: u32) -> Scales<Self>;

    /// Quantises `x [.., columns]`; the transpose only if rows and columns are multiples of 16, which columns always
    /// are.
    fn fp8_cast(x: FloatTensor<Self>, scales: &Scales<Self>, number: Number, sides: Sides) -> Quantized<Self>;

    /// The transpose.
    fn fp8_transposed(x: Matrix<Self>) -> Matrix<Self>;

    /// The rows of all members of the group, in its order.
    fn fp8_gathered(x: Matrix<Self>, group: &Group) -> Matrix<Self>;

    /// `a · bᵀ + bias` in the given shape, which has `a.rows · b.rows` elements. Sides are multiples of 16.
    fn fp8_product(
        a: Matrix<Self>,
        b: Matrix<Self>,
        bias: Option<FloatTensor<Self>>,
        to: (Shape, DType),
        precision: Precision,
    ) -> FloatTensor<Self>;

    /// Writes `a · bᵀ` to the f32 elements of `sum`, or adds it to them.
    fn fp8_accumulate(a: Matrix<Self>, b: Matrix<Self>, sum: &FloatTensor<Self>, add: bool);
}
