//! The GEMMs of one of the two layers of a rank's experts: in the type of the weights, here, or in FP8
//! (`ops/fp8/expert_gemms.rs`). All tokens of an expert are in one chunk, so that results do not depend on the chunks.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::{TensorMetadata, tensor::FloatTensor};

use super::kernels::{MoeKernels, TokenGroups};
use crate::fp8::Purpose;

/// Some of a rank's experts.
#[derive(Clone, Debug)]
pub(crate) struct ExpertRange {
    /// Their indices.
    pub experts: Range<usize>,
    /// Number of the rank's experts.
    pub total: usize,
    /// Tokens of each; in FP8, tokens of each of its groups, as many groups for each expert.
    pub counts: Arc<[usize]>,
    /// Collectives of other chunks take some SMs while their GEMMs run.
    pub shares_sms: bool,
}

impl ExpertRange {
    fn groups(&self) -> TokenGroups<'_> {
        TokenGroups { counts: &self.counts, shares_sms: self.shares_sms }
    }
}

/// A layer of experts with weights `w [experts · out, in]`.
pub(crate) trait ExpertGemms<B: MoeKernels>: Clone + Debug + Send + 'static {
    /// All weights of the rank, as the forward pass uses them.
    type Matrices;
    /// The weights as the input gradients use them.
    type Transposed;
    /// What is saved of the chunk's input.
    type Input: Clone + Debug + Send;
    /// An output gradient.
    type Gradient;
    /// The operands of the weight gradient.
    type Pair: Send + 'static;

    fn matrices(&self, w: &FloatTensor<B>) -> Self::Matrices;

    /// `x_g · w_gᵀ`.
    fn forward(
        &self,
        matrices: &Self::Matrices,
        x: FloatTensor<B>,
        range: &ExpertRange,
        purpose: Purpose,
    ) -> (FloatTensor<B>, Self::Input);

    /// The weights that the forward pass used for `input`.
    fn transposed(&self, w: &FloatTensor<B>, input: &Self::Input) -> Self::Transposed;

    /// The output gradient, and the operands of the weight gradient if it is needed; `recompute` computes an input that
    /// was not saved.
    fn gradient(
        &self,
        grad: FloatTensor<B>,
        input: Self::Input,
        recompute: impl FnOnce() -> FloatTensor<B>,
        range: &ExpertRange,
        wanted: bool,
    ) -> (Self::Gradient, Option<Self::Pair>);

    /// `grad_g · w_g`.
    fn input_grad(&self, grad: Self::Gradient, matrices: &Self::Transposed, range: &ExpertRange) -> FloatTensor<B>;

    /// `Σ grad_gᵀ · x_g` for each expert of the chunk, one after the other.
    fn weight_grad(pair: Self::Pair, range: &ExpertRange) -> FloatTensor<B>;

    /// Writes [`weight_grad`](Self::weight_grad) to the f32 elements of `sum`, or adds it to them.
    fn accumulate_weight_grad(pair: Self::Pair, range: &ExpertRange, sum: &FloatTensor<B>, add: bool);
}

/// In the type of the weights.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plain;

/// The weights of these experts.
fn of_range<B: MoeKernels>(w: &FloatTensor<B>, range: &ExpertRange) -> FloatTensor<B> {
    let [rows, columns] = [w.shape()[0], w.shape()[1]];
    let each = rows / range.total;
    B::rows_in_place(w, range.experts.start * each..range.experts.end * each, columns)
}

impl<B: MoeKernels> ExpertGemms<B> for Plain {
    type Matrices = FloatTensor<B>;
    type Transposed = FloatTensor<B>;
    type Input = Option<FloatTensor<B>>;
    type Gradient = FloatTensor<B>;
    type Pair = [FloatTensor<B>; 2];

    fn matrices(&self, w: &FloatTensor<B>) -> FloatTensor<B> {
        w.clone()
    }

    fn forward(
        &self,
        w: &FloatTensor<B>,
        x: FloatTensor<B>,
        range: &ExpertRange,
        purpose: Purpose,
    ) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
        let saved = (purpose == Purpose::Train { keep: true }).then(|| x.clone());
        (B::grouped_forward(x, of_range::<B>(w, range), range.groups()), saved)
    }

    fn transposed(&self, w: &FloatTensor<B>, _: &Option<FloatTensor<B>>) -> FloatTensor<B> {
        w.clone()
    }

    fn gradient(
        &self,
        grad: FloatTensor<B>,
        input: Option<FloatTensor<B>>,
        recompute: impl FnOnce() -> FloatTensor<B>,
        _: &ExpertRange,
        wanted: bool,
    ) -> (FloatTensor<B>, Option<[FloatTensor<B>; 2]>) {
        let pair = wanted.then(|| [grad.clone(), input.unwrap_or_else(recompute)]);
        (grad, pair)
    }

    fn input_grad(&self, grad: FloatTensor<B>, w: &FloatTensor<B>, range: &ExpertRange) -> FloatTensor<B> {
        B::grouped_input_grad(grad, of_range::<B>(w, range), range.groups())
    }

    fn weight_grad([grad, x]: [FloatTensor<B>; 2], range: &ExpertRange) -> FloatTensor<B> {
        B::grouped_weight_grad(grad, x, range.groups())
    }

    fn accumulate_weight_grad([grad, x]: [FloatTensor<B>; 2], range: &ExpertRange, sum: &FloatTensor<B>, add: bool) {
        B::grouped_accumulate_weight_grad(grad, x, range.groups(), sum, add);
    }
}
