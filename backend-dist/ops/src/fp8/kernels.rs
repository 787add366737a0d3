//! The FP8 kernels of linear layers.

use burn::backend::{DType, Shape, tensor::FloatTensor};

use burn::tensor::Tensor;
use kernels_cubecl::fp8::Granularity;

use super::layers::Operand;
use super::recipe::{Fp8Recipe, Number};
use crate::kernels::LocalKernels;
use ranks::collective_ops::CollectiveOps;
use ranks::comm::Group;

/// The scale of a cast and its reciprocal, `[1]` each, or `[groups]`: f32; on CPU ranks f64 for f64.
#[derive(Clone, Debug)]
pub struct Scales<B: LocalKernels> {
    /// The factor before the cast.
    pub scale: FloatTensor<B>,
    /// The factor after the GEMM.
    pub inverse: FloatTensor<B>,
}

/// How the numbers of a cast are scaled.
#[derive(Clone, Debug)]
pub enum Scaling<B: LocalKernels> {
    /// All by one factor.
    Tensor(Scales<B>),
    /// Each [`BLOCK`](super::BLOCK) consecutive numbers of a row of the form that is written by a power of two.
    Vector,
    /// Each square block by a power of two.
    Block,
}

impl<B: LocalKernels> Scaling<B> {
    /// That of an operand; `scales` are those of a recipe that does not have blocks.
    pub(super) fn of(recipe: &Fp8Recipe, operand: Operand, scales: impl FnOnce() -> Scales<B>) -> Self {
        match (recipe.is_blockwise(), operand) {
            (false, _) => Self::Tensor(scales()),
            (true, Operand::Weight) => Self::Block,
            (true, Operand::Input | Operand::Gradient) => Self::Vector,
        }
    }

    /// Which numbers share a factor.
    pub fn granularity(&self) -> Granularity {
        match self {
            Self::Tensor(_) => Granularity::Tensor,
            Self::Vector => Granularity::Vector,
            Self::Block => Granularity::Block,
        }
    }
}

/// A quantised matrix with a contiguous contraction dimension.
#[derive(Clone, Debug)]
pub struct Matrix<B: LocalKernels> {
    /// The values, in the backend's own form: bytes on CUDA, floats on the FP8 grid on the CPU.
    pub data: FloatTensor<B>,
    /// Rows.
    pub rows: usize,
    /// The contraction dimension of a GEMM.
    pub inner: usize,
    /// The reciprocals of the scales in the backend's own form, `[1]` for a whole tensor.
    pub inverse: FloatTensor<B>,
    /// Which values share a scale.
    pub granularity: Granularity,
    /// The element type.
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

/// The needed forms of a quantised tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sides {
    /// Untransposed.
    pub by_rows: bool,
    /// The transpose.
    pub by_columns: bool,
}

/// The accumulation of an FP8 GEMM on the GPU (Transformer Engine's `use_split_accumulator`, which its recipes set for
/// gradients only).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// In the tensor core's own accumulator.
    Fast,
    /// In f32.
    Full,
}

/// Casts to FP8 and GEMMs of the results. A cast is `round(x · scale)` to nearest even, saturating; NaN is unchanged.
pub trait Fp8Kernels: LocalKernels + CollectiveOps {
    /// The tensor as a public one.
    fn fp8_tensor(x: FloatTensor<Self>) -> Tensor<1>;

    /// The primitive of [`fp8_tensor`](Self::fp8_tensor).
    fn fp8_primitive(x: Tensor<1>) -> FloatTensor<Self>;

    /// The amax, `[1]`; 0 for an empty tensor.
    fn fp8_amax(x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// `max / amax / 2^margin` and its reciprocal for each element of `amax [n]`; 1 if the amax is 0 or not finite.
    fn fp8_scales(amax: FloatTensor<Self>, number: Number, margin: u32) -> Scales<Self>;

    /// Quantises `x [.., columns]`, whose columns are a multiple of 16. The transpose is available if its rows are one
    /// too. With scales of blocks both are multiples of [`BLOCK`](super::BLOCK).
    fn fp8_cast(x: FloatTensor<Self>, scaling: &Scaling<Self>, number: Number, sides: Sides) -> Quantized<Self>;

    /// The transpose of a matrix with one scale.
    fn fp8_transposed(x: Matrix<Self>) -> Matrix<Self>;

    /// The all-gather of the rows.
    fn fp8_gathered(x: Matrix<Self>, group: &Group) -> Matrix<Self>;

    /// The all-gather along the contraction dimension of a matrix with scales of vectors.
    fn fp8_gathered_inner(x: Matrix<Self>, group: &Group) -> Matrix<Self>;

    /// `a · bᵀ + bias` in the given shape, which has `a.rows · b.rows` elements. All sizes are multiples of 16, of
    /// [`BLOCK`](super::BLOCK) with scales of blocks.
    fn fp8_gemm(
        a: Matrix<Self>,
        b: Matrix<Self>,
        bias: Option<FloatTensor<Self>>,
        to: (Shape, DType),
        precision: Precision,
    ) -> FloatTensor<Self>;

    /// Writes `a · bᵀ` to the f32 elements of `sum`, or adds it to them.
    fn fp8_accumulate(a: Matrix<Self>, b: Matrix<Self>, sum: &FloatTensor<Self>, add: bool);
}
