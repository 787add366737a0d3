//! GEMMs that have not run yet, and attention that was computed in place of some.

use super::Float;
use super::softmax::Factors;
use crate::mesh_backend::inner::Inner;
use burn::backend::TensorMetadata;
use burn::tensor::{DType, Shape};
use burn_ir::TensorId;
use ops::AttentionMasks;
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
    /// What is added to every row.
    pub bias: Option<Float<B>>,
    pub result: OnceLock<Float<B>>,
    /// What was computed in place of their softmax, if these are scores.
    pub attention: OnceLock<Attention<B>>,
}

impl<B: Inner> Gemm<B> {
    pub fn new(operands: [(TensorId, Float<B>); 2], names: [Name; 2], dtype: DType, shape: Shape) -> Self {
        Self { operands, names, dtype, shape, bias: None, result: OnceLock::new(), attention: OnceLock::new() }
    }

    /// Of the same operands.
    pub fn with_bias(&self, bias: Float<B>) -> Self {
        let operands = self.operands.each_ref().map(|(id, x)| (*id, x.clone()));
        Self { bias: Some(bias), ..Self::new(operands, self.names, self.dtype, self.shape.clone()) }
    }

    /// Whether this tensor is its left operand.
    pub fn reads(&self, id: TensorId) -> bool {
        self.operands[0].0 == id
    }

    /// Whether it has not run, and multiplies all rows of `a` by one matrix, neither of which is a vector.
    pub fn is_layer(&self) -> bool {
        let [(_, a), (_, b)] = &self.operands;
        let (a, b) = (a.shape(), b.shape());
        let lead = b.num_dims() - 2;
        let is_one = b[..lead].iter().all(|size| *size == 1);
        let rows: usize = a[..a.num_dims() - 1].iter().product();
        self.result.get().is_none() && is_one && rows > 1 && b[lead..].iter().all(|n| *n > 1)
    }

    /// Whether a bias can be added to it, other than in f64.
    pub fn may_have_bias(&self) -> bool {
        self.is_layer() && self.bias.is_none() && self.dtype != DType::F64
    }
}

/// Which booleans a mask is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mask {
    Tensor(TensorId),
    /// For each row of this tensor, whether all of it is true.
    AllOfRows(TensorId),
}

/// What a chain reads.
pub(super) enum Source<B: Inner> {
    Stored(Float<B>),
    /// One where the mask is true, else zero.
    Mask(Mask, Float<B>),
    /// What a chain wrote, by the number of that output among all.
    Output(usize, Float<B>),
    Gemm(Arc<Gemm<B>>),
}

impl<B: Inner> Clone for Source<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Stored(x) => Self::Stored(x.clone()),
            Self::Mask(mask, x) => Self::Mask(*mask, x.clone()),
            Self::Output(number, x) => Self::Output(*number, x.clone()),
            Self::Gemm(gemm) => Self::Gemm(gemm.clone()),
        }
    }
}

/// Equal if they certainly are the same. No tensor of booleans changes, and no other has its name after it.
impl<B: Inner> PartialEq for Source<B> {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Gemm(a), Self::Gemm(b)) => Arc::ptr_eq(a, b),
            (Self::Mask(a, _), Self::Mask(b, _)) => a == b,
            (Self::Output(a, _), Self::Output(b, _)) => a == b,
            _ => false,
        }
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
    /// The tensor that says what is hidden.
    pub hidden: Option<TensorId>,
    pub masks: AttentionMasks<B>,
    /// For the gradient of the output those of queries, keys and values `[b, h, s, d]`.
    pub gradients: Mutex<Option<(Name, [Float<B>; 3])>>,
}

impl<B: Inner> Attention<B> {
    pub fn factors(&self) -> Factors {
        Factors { scale: self.scale, kept: self.masks.kept.map_or(1.0, |kept| kept.factor) }
    }
}

/// The gradient of the values, `Pᵀ · dO`, which waits for those of queries and keys.
pub(super) struct ValueGradient<B: Inner> {
    pub scores: Arc<Gemm<B>>,
    pub name: Name,
    pub output: Float<B>,
}
