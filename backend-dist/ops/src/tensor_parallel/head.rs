//! The head of a language model in chunks: hidden states to losses, with the logits of some positions at a time.
//!
//! Logits are the largest tensor of a step and grow with the sequence. The backward pass recomputes the logits of a
//! chunk, computes its gradients from them, and frees both, so that no more than one chunk exists at any time.

use std::ops::Range;

use burn::backend::{
    Backend, Slice, TensorMetadata,
    autodiff::{NodeId, grads::Gradients, ops::Ops},
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{DType, Int, Tensor};

use super::cross_entropy::{self, VocabShard};
use super::gemm::InputCollective;
use crate::dtype::{cast, wide};
use crate::operation::{Parents, Tensors, apply_with, operation};
use crate::{kernels::LocalKernels, main_grads::main_grad, plain};
use ranks::collective_ops::CollectiveOps;
use ranks::comm::Group;

/// The rank's shard of an output layer.
#[derive(Clone, Debug)]
pub struct Head {
    /// The collective on the hidden states.
    pub entry: InputCollective,
    /// The ranks that share the vocabulary.
    pub group: Group,
    /// Token id of the first row of the rank's weight.
    pub first_row: usize,
    /// Number of token ids; rows of the weight with ids from here on are padding.
    pub vocab_size: usize,
    /// Logits are capped, see [`softcap`](crate::softcap).
    pub softcap: Option<f64>,
    /// Positions of the whole sequence whose logits are computed at a time.
    pub positions: usize,
}

impl Head {
    fn shard(&self, rows: usize) -> VocabShard {
        VocabShard { first_row: self.first_row, valid: self.vocab_size.saturating_sub(self.first_row).min(rows) }
    }

    fn logits<B: LocalKernels>(&self, x: FloatTensor<B>, w: FloatTensor<B>) -> FloatTensor<B> {
        let logits = B::linear_forward(x, w);
        match self.softcap {
            Some(cap) => plain::activation::softcap::<B>(logits, cap),
            None => logits,
        }
    }

    fn chunks(&self, positions: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let step = self.positions;
        (0..positions).step_by(step).map(move |start| start..positions.min(start + step))
    }
}

/// The fusion of [`linear_with`](crate::linear_with) of hidden states `x [s, b, hidden]`, or of the rank's shard of the
/// sequence, with the rank's shard `w [rows, hidden]` of the output layer, and
/// [`vocab_parallel_cross_entropy`](crate::vocab_parallel_cross_entropy) of the logits with `labels [s, b]`; output
/// `[s, b]`. Only the logits of `head.positions` positions exist at a time, in the forward and in the backward pass.
///
/// The weight's gradient is computed together with that of the hidden states, also within
/// [`deferred`](crate::weight_grads::Deferral::deferred): deferring it would need all logits, or their GEMM a third time.
///
/// # Panics
///
/// If the shapes do not fit, or `head.positions` is 0.
pub fn linear_cross_entropy(x: Tensor<3>, w: Tensor<2>, labels: Tensor<2, Int>, head: Head) -> Tensor<2> {
    let ([s, b, hidden], [rows, inner], shape) = (x.dims(), w.dims(), labels.dims());
    assert_eq!(hidden, inner, "head: hidden states have {hidden} features, weight [{rows}, {inner}] takes {inner}");
    let whole = if matches!(head.entry, InputCollective::AllGather(_)) { s * head.group.size() } else { s };
    assert_eq!([whole, b], shape, "head: hidden states of {whole} positions, {b} samples; labels {shape:?}");
    assert!(head.positions > 0, "head: logits of no position at a time");
    let labels = Tensors::ints([labels.into_dispatch()]);
    apply_with(LinearCrossEntropy { head }, [x.into_dispatch(), w.into_dispatch()], labels)
}

/// `x[range]` in the first dimension.
fn chunk<B: Backend>(x: &FloatTensor<B>, range: &Range<usize>) -> FloatTensor<B> {
    B::float_slice(x.clone(), &slices(&x.shape().to_vec(), range))
}

fn labels_of<B: Backend>(labels: &IntTensor<B>, range: &Range<usize>) -> IntTensor<B> {
    B::int_slice(labels.clone(), &slices(&labels.shape().to_vec(), range))
}

fn slices(shape: &[usize], range: &Range<usize>) -> Vec<Slice> {
    let others = shape[1..].iter().map(|&size| Slice::from(0..size));
    std::iter::once(Slice::from(range.clone())).chain(others).collect()
}

fn concat<B: Backend>(mut chunks: Vec<FloatTensor<B>>) -> FloatTensor<B> {
    if chunks.len() == 1 { chunks.remove(0) } else { B::float_cat(chunks, 0) }
}

/// Losses and log-sum-exps, both `[s, b]`.
fn forward<B: LocalKernels + CollectiveOps>(
    x: FloatTensor<B>,
    w: FloatTensor<B>,
    labels: IntTensor<B>,
    head: &Head,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let (x, shard) = (head.entry.forward::<B>(x), head.shard(w.shape()[0]));
    let chunks = head.chunks(x.shape()[0]).map(|range| {
        let logits = head.logits::<B>(chunk::<B>(&x, &range), w.clone());
        cross_entropy::forward::<B>(logits, labels_of::<B>(&labels, &range), shard, head.group.clone())
    });
    let (losses, lse) = chunks.unzip();
    (concat::<B>(losses), concat::<B>(lse))
}

/// Hidden states before the input collective, weight, labels, log-sum-exps.
type Saved<B> = (FloatTensor<B>, FloatTensor<B>, IntTensor<B>, FloatTensor<B>, Head);

operation! {
    /// The constants are the labels.
    LinearCrossEntropy { head: Head }, 2, Saved<B>,
    |[x, w], Tensors { ints, .. }, tracked| {
        let labels = ints.into_iter().next().expect("labels");
        let saved = tracked.then(|| (x.clone(), w.clone(), labels.clone()));
        let (loss, lse) = forward::<B>(x, w, labels, &head);
        (loss, saved.map(|(x, w, labels)| (x, w, labels, lse, head)))
    },
    |(x, w, labels, lse, head), grad, parents| {
        let Parents { ops: Ops { parents: [x_node, w_node], .. }, grads } = parents;
        let (x, shard) = (head.entry.forward::<B>(x), head.shard(w.shape()[0]));
        let mut weight = w_node.map(|node| WeightGrad::<B> { id: node.id, sum: None });
        let mut inputs = Vec::new();
        for range in head.chunks(x.shape()[0]) {
            let x = chunk::<B>(&x, &range);
            let logits = head.logits::<B>(x.clone(), w.clone());
            let [lse, grad] = [&lse, &grad].map(|rows| chunk::<B>(rows, &range));
            let labels = labels_of::<B>(&labels, &range);
            let grad = B::vocab_logits_grad(logits.clone(), lse, labels, grad, shard.first_row, shard.valid);
            let grad = match head.softcap {
                Some(cap) => plain::activation::softcap_grad::<B>(logits, grad, cap),
                None => grad,
            };
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
            grads.register::<B>(node.id, head.entry.backward::<B>(concat::<B>(inputs)));
        }
    },
}

/// The gradient of the weight `id`, chunk by chunk.
struct WeightGrad<B: Backend> {
    id: NodeId,
    /// Of a weight without a main gradient, at least in f32.
    sum: Option<FloatTensor<B>>,
}

impl<B: LocalKernels> WeightGrad<B> {
    fn add(&mut self, grad: FloatTensor<B>, x: FloatTensor<B>) {
        if let Some((sum, add)) = main_grad::<B>(self.id) {
            return B::linear_accumulate_weight_grad(grad, x, &sum, add);
        }
        let chunk = B::linear_weight_grad(grad, x);
        let wide = wide(chunk.dtype());
        let chunk = cast::<B>(chunk, wide);
        self.sum = Some(match self.sum.take() {
            Some(sum) => B::float_add(sum, chunk),
            None => chunk,
        });
    }

    fn finish(self, dtype: DType, grads: &mut Gradients) {
        if let Some(sum) = self.sum {
            grads.register::<B>(self.id, cast::<B>(sum, dtype));
        }
    }
}
