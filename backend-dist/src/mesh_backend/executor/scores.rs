//! Attention as modules write it: a softmax of scores between two GEMMs, as in burn-nn's `MultiHeadAttention`. Where
//! FlashAttention has the same result, it runs in place of the second GEMM. The scores, their softmax and what autodiff
//! keeps of it are then [deferred](super::chain::Deferred): nobody has read them, and usually nobody will.
//!
//! What a chain computes is recognized by its numbers: on a few scores it must give what the formula gives.

use super::attention::{by_head, by_position};
use super::chain::Deferred;
use super::lazy::{Attention, Name, Source, ValueGradient};
use super::reads::Reads;
use super::views::View;
use super::{Executor, Float};
use crate::mesh_backend::inner::Inner;
use burn::backend::TensorMetadata;
use burn_ir::{BaseOperationIr, MatmulOpIr, OperationIr, TensorId, TensorIr, TensorStatus};
use ops::{AttentionMasks, AttentionOptions, Kept};
use parking_lot::Mutex;
use std::sync::Arc;

impl<B: Inner> Executor<B> {
    /// Takes a GEMM that is part of attention.
    pub(super) fn gemm_of_attention(&mut self, op: &MatmulOpIr) -> bool {
        op.out.shape.num_dims() == 4
            && op.lhs.shape[..2] == op.rhs.shape[..2]
            && (self.output(op) || self.query_gradient(op) || self.key_gradient(op) || self.value_gradient(op))
    }

    /// What a tensor is the transpose of.
    pub(super) fn name(&self, id: TensorId) -> Name {
        self.names.get(&id).copied().unwrap_or(Name { id, transposed: false })
    }

    /// Notes a transpose. That of a deferred tensor is deferred.
    pub(super) fn transpose(&mut self, op: &OperationIr) -> bool {
        let OperationIr::BaseFloat(BaseOperationIr::SwapDims(op)) = op else { return false };
        let (x, out, rank) = (&op.input, &op.out, op.input.shape.num_dims());
        if rank != 4 || op.dim1 + op.dim2 != 5 || op.dim1 == op.dim2 {
            return false;
        }
        let name = self.name(x.id);
        self.names.insert(out.id, Name { transposed: !name.transposed, ..name });
        self.defer_view(x, out.id, &View::SwapDims(2, 3))
    }

    /// `softmax(c q kᵀ) v`, where the chain has the softmax.
    fn output(&mut self, op: &MatmulOpIr) -> bool {
        let Some(weights) = self.pending(op.lhs.id) else { return false };
        let Some(reads) = Reads::of(&weights).filter(|reads| reads.gradient.is_none()) else { return false };
        let scores = &reads.scores;
        let known = self.known.factors(&reads.formula(&weights));
        let (Some(factors), None) = (known, scores.attention.get()) else { return false };
        let [q, k] = scores.operands.each_ref().map(|(_, x)| x.clone());
        let head_dim = op.rhs.shape[3];
        let kept = reads.draw.map(|draw| Kept { draw, factor: factors.kept });
        let (hidden, is_hidden) = reads.hidden.unzip();
        let masks = AttentionMasks::new(is_hidden, kept);
        let (from, to) = (q.shape(), k.shape());
        // Scores may be of one matrix for all samples or heads.
        let is_here = op.lhs.shape == scores.shape
            && from[..2] == to[..2]
            && !self.chain.has_sums()
            && !self.chain.has(op.rhs.id)
            && from[3] == head_dim
            && match masks.is_empty() {
                true => B::has_flash_attention(head_dim, scores.dtype),
                false => B::has_masked_attention(&by_position::<B>(q.clone()), scores.shape[3]),
            };
        if !is_here {
            return false;
        }
        self.want(op.rhs.id, scores.dtype);
        let value = self.name(op.rhs.id);
        let qkv = [q, transposed::<B>(k), self.in_type(&op.rhs, scores.dtype)].map(by_position::<B>);
        self.count("attention");
        let [y, saved] = attend::<B>(qkv.clone(), &masks, factors.scale);
        self.insert(op.out.id, by_head::<B>(y.clone()), self.half == Some(scores.dtype));
        let (result, gradients) = ([y, saved], Mutex::default());
        let attention = Attention { value, qkv, result, scale: factors.scale, hidden, masks, gradients };
        let _ = scores.attention.set(attention);
        self.defer_chain();
        self.end(&op.lhs);
        true
    }

    /// The gradient of the queries, `dS · k`, where the chain has the gradient `dS` of the scores.
    fn query_gradient(&mut self, op: &MatmulOpIr) -> bool {
        let key = self.name(op.rhs.id);
        let Some([gradient, _]) = self.gradients(op.lhs.id, |[_, k]| k == key.transpose()) else { return false };
        self.end(&op.rhs);
        self.put_gradient(op, &op.lhs, gradient)
    }

    /// That of the transposed keys, `qᵀ · dS`.
    fn key_gradient(&mut self, op: &MatmulOpIr) -> bool {
        let query = self.name(op.lhs.id);
        let Some([_, gradient]) = self.gradients(op.rhs.id, |[q, _]| q == query.transpose()) else { return false };
        self.end(&op.lhs);
        self.put_gradient(op, &op.rhs, transposed::<B>(gradient))
    }

    fn put_gradient(&mut self, op: &MatmulOpIr, scores: &TensorIr, gradient: Float<B>) -> bool {
        self.insert(op.out.id, gradient, self.half.is_some());
        self.end(scores);
        true
    }

    /// That of the values, where the transpose of the softmax is deferred.
    fn value_gradient(&mut self, op: &MatmulOpIr) -> bool {
        let Some((weights, views)) = self.viewed.get(&op.lhs.id) else { return false };
        if !matches!(views[..], [View::SwapDims(2, 3)]) {
            return false;
        }
        let weights = weights.clone();
        let Some(reads) = Reads::of(&weights) else { return false };
        let scores = reads.scores.clone();
        let Some(attention) = scores.attention.get() else { return false };
        let known = self.known.factors(&reads.formula(&weights));
        let is_of_values = attention.result[0].shape()[3] == op.rhs.shape[3]
            && attention.has_masks_of(&reads)
            && known.is_some_and(|factors| factors.are_near(attention.factors()));
        if !is_of_values {
            return false;
        }
        self.want(op.rhs.id, scores.dtype);
        let (name, output) = (self.name(op.rhs.id), self.in_type(&op.rhs, scores.dtype));
        self.value_gradients.insert(op.out.id, ValueGradient { scores, name, output });
        self.end(&op.lhs);
        true
    }

    /// Computes the gradient of values that waits under this name.
    pub(super) fn run_value_gradient(&mut self, id: TensorId) {
        let Some(ValueGradient { scores, name, output }) = self.value_gradients.remove(&id) else { return };
        let attention = scores.attention.get().expect("there is a gradient of values because there is attention");
        let [_, _, gradient] = self.attention_gradients_of(attention, name, output);
        self.insert(id, gradient, self.half.is_some());
    }

    /// Those of queries and keys if the chain computes `id` as the gradient of scores whose operands are as `fits` wants.
    fn gradients(&mut self, id: TensorId, fits: impl FnOnce([Name; 2]) -> bool) -> Option<[Float<B>; 2]> {
        let pending = self.pending(id)?;
        let reads = Reads::of(&pending)?;
        let (scores, grad) = (&reads.scores, reads.gradient.as_ref()?);
        let attention = scores.attention.get()?;
        let is_gradient = fits(scores.names)
            && !self.chain.has_sums()
            && grad.shape == scores.shape
            && grad.names[1] == attention.value.transpose()
            && attention.has_masks_of(&reads)
            && self.known.is_gradient(&reads.formula(&pending), attention.factors());
        if !is_gradient {
            return None;
        }
        if self.chain.has(id) {
            self.defer_chain();
        }
        let (_, output) = grad.operands[0].clone();
        let [q, k, _] = self.attention_gradients_of(attention, grad.names[0], output);
        Some([q, k])
    }

    /// The gradients of attention for the gradient of its output, which are computed once.
    fn attention_gradients_of(&mut self, attention: &Attention<B>, name: Name, output: Float<B>) -> [Float<B>; 3] {
        let mut known = attention.gradients.lock();
        if let Some((_, gradients)) = known.as_ref().filter(|(other, _)| *other == name) {
            return gradients.clone();
        }
        self.count("attention gradient");
        let gradients = attention_gradients(attention, by_position::<B>(output)).map(by_head::<B>);
        *known = Some((name, gradients.clone()));
        gradients
    }

    /// The launch that computes a tensor which is not in memory.
    fn pending(&self, id: TensorId) -> Option<Deferred<Source<B>>> {
        let launch = || self.chain.launch_of(id, self.limits.dtype, self.half.is_some());
        self.deferred.get(&id).cloned().or_else(|| launch().map(Arc::new))
    }

    fn defer_chain(&mut self) {
        let deferred = self.chain.defer(self.limits.dtype, self.half.is_some());
        self.deferred.extend(deferred);
    }

    /// Drops a tensor if this was its last use.
    pub(super) fn end(&mut self, x: &TensorIr) {
        if x.status == TensorStatus::ReadWrite {
            self.drop_tensor(x.id);
        }
    }
}

/// Output and log-sum-exp.
fn attend<B: Inner>(qkv: [Float<B>; 3], masks: &AttentionMasks<B>, scale: f64) -> [Float<B>; 2] {
    if !masks.is_empty() {
        return B::masked_attention(qkv, masks, scale);
    }
    let [q, k, v] = qkv;
    let (y, saved) = B::attention_forward(q, k, v, AttentionOptions::full(scale));
    [y, saved]
}

/// The gradients of queries, keys and values for that of the output.
fn attention_gradients<B: Inner>(attention: &Attention<B>, grad: Float<B>) -> [Float<B>; 3] {
    let Attention { qkv, result, masks, scale, .. } = attention;
    let (qkv, result) = (qkv.clone(), result.clone());
    match masks.is_empty() {
        true => B::attention_grads(qkv, result, grad, AttentionOptions::full(*scale)),
        false => B::masked_attention_grads(qkv, result, grad, masks, *scale),
    }
}

/// The last two dimensions swapped.
fn transposed<B: Inner>(x: Float<B>) -> Float<B> {
    B::float_swap_dims(x, 2, 3)
}
