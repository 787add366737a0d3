//! How the pieces of a rank's experts multiply with one of their two layers: in the type of its matrices, here, or in
//! FP8 (`ops/fp8/pieces.rs`). All rows of an expert are in one piece, so that no number depends on the pieces.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::{TensorMetadata, tensor::FloatTensor};

use super::kernels::MoeKernels;
use crate::ops::fp8::Purpose;

/// Some of a rank's experts.
#[derive(Clone, Debug)]
pub(in crate::ops) struct Part {
    /// Which.
    pub experts: Range<usize>,
    /// How many the rank has.
    pub of: usize,
    /// Rows of each, in FP8 of each of its groups of rows, as many for each expert.
    pub counts: Arc<[usize]>,
}

/// A layer of experts with matrices `w [experts · out, in]`.
pub(in crate::ops) trait Products<B: MoeKernels>: Clone + Debug + Send + 'static {
    /// All of the rank's matrices, as the forward pass multiplies with them.
    type Matrices;
    /// The same for gradients of rows.
    type Transposed;
    /// What is kept of a part's input.
    type Input: Clone + Debug + Send;
    /// A gradient of results.
    type Gradient;
    /// What the gradient of a part's matrices is the product of.
    type Pair: Send + 'static;

    fn matrices(&self, w: &FloatTensor<B>) -> Self::Matrices;

    /// `x_g · w_gᵀ`.
    fn forward(
        &self,
        matrices: &Self::Matrices,
        x: FloatTensor<B>,
        part: &Part,
        purpose: Purpose,
    ) -> (FloatTensor<B>, Self::Input);

    /// The matrices with which `input` met in the forward pass.
    fn transposed(&self, w: &FloatTensor<B>, input: &Self::Input) -> Self::Transposed;

    /// A gradient of results, and what the matrices' gradient is made of if it is wanted; `again` makes an input that
    /// was not kept.
    fn gradient(
        &self,
        grad: FloatTensor<B>,
        input: Self::Input,
        again: impl FnOnce() -> FloatTensor<B>,
        part: &Part,
        wanted: bool,
    ) -> (Self::Gradient, Option<Self::Pair>);

    /// `grad_g · w_g`.
    fn input_grad(&self, grad: Self::Gradient, matrices: &Self::Transposed, part: &Part) -> FloatTensor<B>;

    /// `Σ grad_gᵀ · x_g` for each expert of the part, below each other.
    fn weight_grad(pair: Self::Pair, part: &Part) -> FloatTensor<B>;

    /// Writes [`weight_grad`](Self::weight_grad) to the f32 elements of `sum`, or adds it to them.
    fn accumulate_weight_grad(pair: Self::Pair, part: &Part, sum: &FloatTensor<B>, add: bool);
}

/// In the type of the matrices.
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) struct Plain;

/// The part's matrices.
fn of_part<B: MoeKernels>(w: &FloatTensor<B>, part: &Part) -> FloatTensor<B> {
    let [rows, columns] = [w.shape()[0], w.shape()[1]];
    let each = rows / part.of;
    B::rows_in_place(w, part.experts.start * each..part.experts.end * each, columns)
}

impl<B: MoeKernels> Products<B> for Plain {
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
        part: &Part,
        purpose: Purpose,
    ) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
        let kept = (purpose == Purpose::Train { keep: true }).then(|| x.clone());
        (B::grouped_forward(x, of_part::<B>(w, part), &part.counts), kept)
    }

    fn transposed(&self, w: &FloatTensor<B>, _: &Option<FloatTensor<B>>) -> FloatTensor<B> {
        w.clone()
    }

    fn gradient(
        &self,
        grad: FloatTensor<B>,
        input: Option<FloatTensor<B>>,
        again: impl FnOnce() -> FloatTensor<B>,
        _: &Part,
        wanted: bool,
    ) -> (FloatTensor<B>, Option<[FloatTensor<B>; 2]>) {
        let pair = wanted.then(|| [grad.clone(), input.unwrap_or_else(again)]);
        (grad, pair)
    }

    fn input_grad(&self, grad: FloatTensor<B>, w: &FloatTensor<B>, part: &Part) -> FloatTensor<B> {
        B::grouped_input_grad(grad, of_part::<B>(w, part), &part.counts)
    }

    fn weight_grad([grad, x]: [FloatTensor<B>; 2], part: &Part) -> FloatTensor<B> {
        B::grouped_weight_grad(grad, x, &part.counts)
    }

    fn accumulate_weight_grad([grad, x]: [FloatTensor<B>; 2], part: &Part, sum: &FloatTensor<B>, add: bool) {
        B::grouped_accumulate_weight_grad(grad, x, &part.counts, sum, add);
    }
}
