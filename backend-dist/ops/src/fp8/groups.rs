//! The FP8 kernels of an MoE layer's experts: matrices with scales for each group of rows.

use std::ops::Range;
use std::sync::Arc;

use burn::backend::{DType, tensor::FloatTensor as Float};
use kernels_cubecl::fp8::Granularity;

use super::kernels::{Fp8Kernels, Precision, Scaling, Sides};
use super::recipe::Number;
use crate::kernels::LocalKernels;

/// Groups of rows of a matrix `[rows, columns]`, each quantised with its own scale or with scales of its blocks.
#[derive(Clone, Debug)]
pub struct Groups<B: LocalKernels> {
    /// The values of one group after the other, in the backend's own form: bytes on CUDA, floats on the FP8 grid on the
    /// CPU.
    pub data: Float<B>,
    /// Rows of each.
    pub counts: Arc<[usize]>,
    /// Columns of all.
    pub columns: usize,
    /// How each is stored.
    pub form: Form,
    /// The reciprocals of the scales, in the backend's own form.
    pub inverse: Float<B>,
    /// Which values of a group share a scale.
    pub granularity: Granularity,
    /// The element type.
    pub number: Number,
}

/// How the matrix of a group is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// `[rows, columns]`.
    Rows,
    /// `[columns, rows]`.
    Transpose,
    /// A part of the transpose of all, `[columns, rows of all]`.
    TransposeOfAll,
}

/// What the rows of a cast are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowsOf {
    /// Output features: transposes are for input gradients.
    Weights,
    /// Tokens: transposes are for weight gradients.
    Tokens,
}

impl<B: LocalKernels> Groups<B> {
    /// Rows and contraction dimension of a group's matrix, and its range of elements.
    ///
    /// # Panics
    /// If it has no place of its own.
    pub fn matrix(&self, group: usize) -> ([usize; 2], Range<usize>) {
        let (rows, columns) = (self.counts[group], self.columns);
        let start = self.counts[..group].iter().sum::<usize>() * columns;
        let sides = match self.form {
            Form::Rows => [rows, columns],
            Form::Transpose => [columns, rows],
            Form::TransposeOfAll => panic!("group {group} is stored between others"),
        };
        (sides, start..start + rows * columns)
    }
}

/// Both forms of quantised groups.
#[derive(Clone, Debug)]
pub struct QuantizedGroups<B: LocalKernels> {
    /// Untransposed.
    pub by_rows: Option<Groups<B>>,
    /// Their transposes.
    pub by_columns: Option<Groups<B>>,
}

/// [`Fp8Kernels`] for groups of rows. Counts are multiples of 16 or zero, and not all zero; columns are multiples of
/// 16. With scales of blocks both are multiples of [`BLOCK`](super::BLOCK).
///
/// `x` may have several groups for each of the weights `w`: groups `i n .. (i + 1) n` belong to weight `i`.
pub trait Fp8GroupKernels: Fp8Kernels {
    /// The amax of each group of `x [rows, columns]`, `[groups]`; 0 for an empty one.
    fn fp8_groups_amax(x: Float<Self>, counts: &[usize]) -> Float<Self>;

    /// Quantises each group of `x [rows, columns]`, rows of weights or of tokens, with its own scale, of `[groups]`, or with
    /// scales of its blocks.
    fn fp8_groups_cast(
        x: Float<Self>,
        scaling: &Scaling<Self>,
        number: Number,
        counts: &Arc<[usize]>,
        to: (Sides, RowsOf),
    ) -> QuantizedGroups<Self>;

    /// `x_g · w_iᵀ`, one group after the other: `[rows, rows of a w]`.
    fn fp8_groups_gemm(x: &Groups<Self>, w: &Groups<Self>, dtype: DType, precision: Precision) -> Float<Self>;

    /// `Σ_g grad_g · x_gᵀ` over the groups of each of `matrices` weights, one after the other; both operands are
    /// transposes. Zero for a weight without rows.
    fn fp8_groups_weight_grad(grad: &Groups<Self>, x: &Groups<Self>, matrices: usize, dtype: DType) -> Float<Self>;

    /// Writes [`fp8_groups_weight_grad`](Self::fp8_groups_weight_grad) to the f32 elements of `sum`, or adds it to
    /// them.
    fn fp8_groups_accumulate(grad: &Groups<Self>, x: &Groups<Self>, matrices: usize, sum: &Float<Self>, add: bool);
}
