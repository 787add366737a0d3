//! GEMMs that have not run yet, and attention that was computed in place of some.

use super::Float;
use crate::mesh_backend::inner::Inner;
use burn::tensor::{DType, Shape};
use burn_ir::TensorId;
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock};

/// A tensor, or its transpose over the last two dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name {
    pub id: TensorId,
    pub transposed: bool,
}

impl Name {
    pub fn transpose(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }
}

/// `a · b` of each matrix, in memory once somebody reads it.
pub(super) struct Gemm<B: Inner> {
    pub operands: [(TensorId, Float<B>); 2],
    pub names: [Name; 2],
    pub dtype: DType,
    pub shape: Shape,
    pub result: OnceLock<Float<B>>,
    /// What was computed in place of their softmax, if these are scores.
    pub attention: OnceLock<Attention<B>>,
}

impl<B: Inner> Gemm<B> {
    pub fn new(operands: [(TensorId, Float<B>); 2], names: [Name; 2], dtype: DType, shape: Shape) -> Self {
        Self { operands, names, dtype, shape, result: OnceLock::new(), attention: OnceLock::new() }
    }
}

/// What a chain reads.
pub(super) enum Source<B: Inner> {
    Stored(Float<B>),
    Gemm(Arc<Gemm<B>>),
}

impl<B: Inner> Clone for Source<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Stored(x) => Self::Stored(x.clone()),
            Self::Gemm(gemm) => Self::Gemm(gemm.clone()),
        }
    }
}

/// Equal if they certainly are the same.
impl<B: Inner> PartialEq for Source<B> {
    fn eq(&self, other: &Self) -> bool {
        matches!((self, other), (Self::Gemm(a), Self::Gemm(b)) if Arc::ptr_eq(a, b))
    }
}

/// What was computed in place of the softmax of scores.
pub(super) struct Attention<B: Inner> {
    pub value: Name,
    /// `[s, b, h, d]`.
    pub qkv: [Float<B>; 3],
    /// The output `[s, b, h, d]`, and the log-sum-exp as kernels keep it.
    pub result: [Float<B>; 2],
    pub scale: f64,
    /// For the gradient of the output those of queries, keys and values `[b, h, s, d]`.
    pub gradients: Mutex<Option<(Name, [Float<B>; 3])>>,
}

/// The gradient of the values, `Pᵀ · dO`, which waits for those of queries and keys.
pub(super) struct ValueGradient<B: Inner> {
    pub scores: Arc<Gemm<B>>,
    pub name: Name,
    pub output: Float<B>,
}
