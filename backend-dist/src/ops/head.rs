//! The head of a language model in pieces: hidden states to losses, with the logits of some positions at a time.
//!
//! Logits are the largest tensor of a step and grow with the sequence. The backward pass computes a piece's logits
//! again, makes its gradients from them, and forgets both, so that no more than one piece exists at any time.

use std::ops::Range;

use burn::backend::{
    Autodiff, Backend, Dispatch, Flex, FloatDType, Slice, TensorMetadata,
    autodiff::{
        NodeId,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{DType, Int, Tensor};

use super::cross_entropy::{self, Part};
use super::kernels::LocalKernels;
use super::main_grads::place;
use super::product::Entry;
use crate::comm::Group;
use crate::exchange::ExchangeOps;

/// The logits that a rank computes at once where nothing else is said: 4 GiB in half precision.
pub const LOGITS_AT_ONCE: usize = 1 << 31;

/// How many of `positions`, each with `logits` logits on this rank, a head computes at a time if it may hold `at_once`
/// logits: all, or equal pieces of at most half as many logits. A head that is cut pays for a product that is computed
/// twice, so it is not cut for little.
pub fn positions_at_once(positions: usize, logits: usize, at_once: usize) -> usize {
    if positions * logits <= at_once {
        return positions.max(1);
    }
    let most = (at_once / 2 / logits.max(1)).max(1);
    positions.div_ceil(positions.div_ceil(most))
}

/// The rank's part of an output layer.
#[derive(Clone, Debug)]
pub struct Head {
    /// How hidden states come to the rank.
    pub entry: Entry,
    /// The ranks that share the vocabulary.
    pub group: Group,
    /// Id of the first row of the rank's weight.
    pub first_row: usize,
    /// Number of tokens; rows of the weight with ids from here on are padding.
    pub vocab_size: usize,
    /// Positions of the whole sequence whose logits are computed at once.
    pub positions: usize,
}

impl Head {
    fn part(&self, rows: usize) -> Part {
        Part { first_row: self.first_row, valid: self.vocab_size.saturating_sub(self.first_row).min(rows) }
    }

    fn pieces(&self, positions: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let step = self.positions;
        (0..positions).step_by(step).map(move |start| start..positions.min(start + step))
    }
}

/// The same as [`linear_with`](super::linear_with) of hidden states `x [s, b, hidden]`, or the rank's part of the
/// sequence, with the rank's rows `w [rows, hidden]` of the output layer, and
/// [`vocab_parallel_cross_entropy`](super::vocab_parallel_cross_entropy) of the logits with `labels [s, b]`; output
/// `[s, b]`. Of the logits only those of `head.positions` positions exist at a time, in the forward and in the backward
/// pass.
///
/// The weight's gradient is computed with the hidden states', also within [`deferred`](super::weight_grads::deferred):
/// to put it off would need all logits, or their product a third time.
///
/// # Panics
///
/// If the shapes do not fit, or `head.positions` is 0.
pub fn linear_cross_entropy(x: Tensor<3>, w: Tensor<2>, labels: Tensor<2, Int>, head: Head) -> Tensor<2> {
    let ([s, b, hidden], [rows, inner], shape) = (x.dims(), w.dims(), labels.dims());
    assert_eq!(hidden, inner, "head: hidden states have {hidden} features, weight [{rows}, {inner}] takes {inner}");
    let whole = if matches!(head.entry, Entry::Gathered(_)) { s * head.group.size() } else { s };
    assert_eq!([whole, b], shape, "head: hidden states of {whole} positions, {b} samples; labels {shape:?}");
    assert!(head.positions > 0, "head: logits of no position at a time");
    let (x, w, labels) = (x.into_dispatch(), w.into_dispatch(), labels.into_dispatch());
    Tensor::from_dispatch(<Dispatch as HeadOps>::op_head(x, w, labels, head))
}

#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Autodiff)]
trait HeadOps: Backend {
    fn op_head(x: FloatTensor<Self>, w: FloatTensor<Self>, labels: IntTensor<Self>, head: Head) -> FloatTensor<Self>;
}

macro_rules! head_ops {
    ($backend:ty) => {
        impl HeadOps for $backend {
            fn op_head(
                x: FloatTensor<Self>,
                w: FloatTensor<Self>,
                labels: IntTensor<Self>,
                head: Head,
            ) -> FloatTensor<Self> {
                forward::<Self>(x, w, labels, &head).0
            }
        }
    };
}

head_ops!(Flex);
#[cfg(feature = "cuda")]
head_ops!(burn::backend::Cube);

/// `x[at]` of the first dimension.
fn piece<B: Backend>(x: &FloatTensor<B>, at: &Range<usize>) -> FloatTensor<B> {
    B::float_slice(x.clone(), &slices(&x.shape().to_vec(), at))
}

fn labels_of<B: Backend>(labels: &IntTensor<B>, at: &Range<usize>) -> IntTensor<B> {
    B::int_slice(labels.clone(), &slices(&labels.shape().to_vec(), at))
}

fn slices(shape: &[usize], at: &Range<usize>) -> Vec<Slice> {
    let others = shape[1..].iter().map(|&size| Slice::from(0..size));
    std::iter::once(Slice::from(at.clone())).chain(others).collect()
}

fn joined<B: Backend>(mut pieces: Vec<FloatTensor<B>>) -> FloatTensor<B> {
    if pieces.len() == 1 { pieces.remove(0) } else { B::float_cat(pieces, 0) }
}

/// Losses and log-sum-exps, both `[s, b]`.
fn forward<B: LocalKernels + ExchangeOps>(
    x: FloatTensor<B>,
    w: FloatTensor<B>,
    labels: IntTensor<B>,
    head: &Head,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let (x, part) = (head.entry.forward::<B>(x), head.part(w.shape()[0]));
    let pieces = head.pieces(x.shape()[0]).map(|at| {
        let logits = B::linear_forward(piece::<B>(&x, &at), w.clone());
        cross_entropy::forward::<B>(logits, labels_of::<B>(&labels, &at), part, head.group.clone())
    });
    let (losses, lse) = pieces.unzip();
    (joined::<B>(losses), joined::<B>(lse))
}

/// Hidden states as they came, weight, labels, log-sum-exps.
type Kept<B> = (FloatTensor<B>, FloatTensor<B>, IntTensor<B>, FloatTensor<B>, Head);

#[derive(Debug)]
struct LinearCrossEntropy;

impl<B: LocalKernels + ExchangeOps> Backward<B, 2> for LinearCrossEntropy {
    type State = Kept<B>;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let ([x_node, w_node], (x, w, labels, lse, head)) = (ops.parents, ops.state);
        let (x, part) = (head.entry.forward::<B>(x), head.part(w.shape()[0]));
        let mut weight = w_node.map(|node| WeightGrad::<B> { id: node.id, sum: None });
        let mut inputs = Vec::new();
        for at in head.pieces(x.shape()[0]) {
            let x = piece::<B>(&x, &at);
            let logits = B::linear_forward(x.clone(), w.clone());
            let [lse, grad] = [&lse, &grad].map(|rows| piece::<B>(rows, &at));
            let labels = labels_of::<B>(&labels, &at);
            let grad = B::vocab_logits_grad(logits, lse, labels, grad, part.first_row, part.valid);
            if x_node.is_some() {
                inputs.push(B::linear_input_grad(grad.clone(), w.clone()));
            }
            if let Some(weight) = &mut weight {
                weight.add(grad, x);
            }
        }
        if let Some(weight) = weight {
            weight.finish(w.dtype(), grads);
        }
        if let Some(node) = x_node {
            grads.register::<B>(node.id, head.entry.backward::<B>(joined::<B>(inputs)));
        }
    }
}

/// The gradient of the weight `id`, piece by piece.
struct WeightGrad<B: Backend> {
    id: NodeId,
    /// Of a weight without a place, at least in f32.
    sum: Option<FloatTensor<B>>,
}

impl<B: LocalKernels> WeightGrad<B> {
    fn add(&mut self, grad: FloatTensor<B>, x: FloatTensor<B>) {
        if let Some((sum, add)) = place::<B>(self.id) {
            return B::linear_accumulate_weight_grad(grad, x, &sum, add);
        }
        let piece = B::linear_weight_grad(grad, x);
        let wide = if piece.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let piece = to_dtype::<B>(piece, wide);
        self.sum = Some(match self.sum.take() {
            Some(sum) => B::float_add(sum, piece),
            None => piece,
        });
    }

    fn finish(self, dtype: DType, grads: &mut Gradients) {
        if let Some(sum) = self.sum {
            grads.register::<B>(self.id, to_dtype::<B>(sum, dtype));
        }
    }
}

fn to_dtype<B: Backend>(x: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    if x.dtype() == dtype { x } else { B::float_cast(x, FloatDType::from(dtype)) }
}

impl<B: LocalKernels + ExchangeOps, C: CheckpointStrategy> HeadOps for Autodiff<B, C> {
    fn op_head(x: FloatTensor<Self>, w: FloatTensor<Self>, labels: IntTensor<Self>, head: Head) -> FloatTensor<Self> {
        let ((x, x_node), (w, w_node)) = (x.into_parts(), w.into_parts());
        // Compute-bound: a checkpointing strategy must never repeat an exchange.
        match LinearCrossEntropy.prepare::<C>([x_node, w_node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let (loss, lse) = forward::<B>(x.clone(), w.clone(), labels.clone(), &head);
                prep.finish((x, w, labels, lse, head), loss)
            }
            OpsKind::UnTracked(prep) => prep.finish(forward::<B>(x, w, labels, &head).0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_cut_evenly_and_not_for_little() {
        assert_eq!(positions_at_once(8192, 128_256, LOGITS_AT_ONCE), 8192);
        assert_eq!(positions_at_once(16_384, 128_256, LOGITS_AT_ONCE), 16_384);
        assert_eq!(positions_at_once(65_536, 128_256, LOGITS_AT_ONCE), 8192);
        assert_eq!(positions_at_once(10, 7, 69), 4, "three pieces of 4, 4 and 2 positions with 28 logits at most");
        assert_eq!(positions_at_once(10, 7, 1), 1);
        assert_eq!(positions_at_once(0, 7, 1), 1);
    }
}
