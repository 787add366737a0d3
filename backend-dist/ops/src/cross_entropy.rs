//! Cross-entropy over a vocabulary sharded among ranks, after Megatron-LM's
//! `megatron/core/tensor_parallel/cross_entropy.py`: the logits of a token are never gathered on one rank.

use burn::backend::{
    Autodiff, Dispatch, Slice, TensorMetadata,
    autodiff::{
        checkpoint::strategy::CheckpointStrategy,
        ops::{Backward, OpsKind},
    },
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{Int, Tensor};

use super::kernels::LocalKernels;
use crate::extension::{node, operations};
use ranks::collective_ops::{Collective, CollectiveOps};
use ranks::comm::{Group, ReduceOp};

/// The shard of the vocabulary whose logits this rank holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct VocabShard {
    /// Id of the first column.
    pub first_row: usize,
    /// Columns before the padding.
    pub valid: usize,
}

/// `-log softmax(logits)[label]` for logits sharded along the vocabulary over `group`.
///
/// `logits [s, b, v_local]` are this rank's columns; the first has id `first_row`. Columns with ids from `vocab_size`
/// on are padding and are ignored. `labels [s, b]` are global ids, the same on all ranks. The result `[s, b]` is the
/// same on all ranks, in f64 for f64 logits, else f32. A label outside the vocabulary gives the log-sum-exp: mask such
/// positions.
///
/// Over several ranks the maxima are all-reduced first, then the sums of exponentials together with the labels' logits;
/// the backward pass needs no collective.
///
/// # Panics
///
/// If the shapes do not fit.
pub fn vocab_parallel_cross_entropy(
    logits: Tensor<3>,
    labels: Tensor<2, Int>,
    first_row: usize,
    vocab_size: usize,
    group: &Group,
) -> Tensor<2> {
    let ([s, b, columns], shape) = (logits.dims(), labels.dims());
    assert_eq!([s, b], shape, "cross-entropy: logits are [{s}, {b}, {columns}], labels {shape:?}");
    let shard = VocabShard { first_row, valid: vocab_size.saturating_sub(first_row).min(columns) };
    let (logits, labels) = (logits.into_dispatch(), labels.into_dispatch());
    Tensor::from_dispatch(<Dispatch as CrossEntropyOps>::op_cross_entropy(logits, labels, shard, group.clone()))
}

operations! {
    trait CrossEntropyOps {
        fn op_cross_entropy(
            logits: FloatTensor<Self>,
            labels: IntTensor<Self>,
            shard: VocabShard,
            group: Group,
        ) -> FloatTensor<Self> {
            forward::<Self>(logits, labels, shard, group).0
        }
    }
}

/// Loss and log-sum-exp, both `[s, b]`.
pub(super) fn forward<B: LocalKernels + CollectiveOps>(
    logits: FloatTensor<B>,
    labels: IntTensor<B>,
    shard: VocabShard,
    group: Group,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let [max, sums] = if group.size() == 1 {
        B::vocab_statistics(logits, labels, shard.first_row, shard.valid)
    } else {
        let max = B::vocab_maximum(logits.clone(), shard.valid);
        let max = B::collective(max, Collective::AllReduce(ReduceOp::Max), None, group.clone());
        let sums = B::vocab_sums(logits, max.clone(), labels, shard.first_row, shard.valid);
        [max, B::collective(sums, Collective::AllReduce(ReduceOp::Sum), None, group)]
    };
    let shape = max.shape();
    let row = |i: usize| {
        let slices = [Slice::from(i..i + 1), Slice::from(0..shape[0]), Slice::from(0..shape[1])];
        B::float_reshape(B::float_slice(sums.clone(), &slices), shape.clone())
    };
    let log_total = B::float_log(row(0));
    (B::float_sub(log_total.clone(), row(1)), B::float_add(max, log_total))
}

node!(CrossEntropy: LocalKernels, 1, (FloatTensor<B>, FloatTensor<B>, IntTensor<B>, VocabShard), |ops, grad, grads| {
    let (logits, lse, labels, shard) = ops.state;
    if let [Some(node)] = ops.parents {
        let grad = B::vocab_logits_grad(logits, lse, labels, grad, shard.first_row, shard.valid);
        grads.register::<B>(node.id, grad);
    }
});

impl<B: LocalKernels + CollectiveOps, C: CheckpointStrategy> CrossEntropyOps for Autodiff<B, C> {
    fn op_cross_entropy(
        logits: FloatTensor<Self>,
        labels: IntTensor<Self>,
        shard: VocabShard,
        group: Group,
    ) -> FloatTensor<Self> {
        let (logits, node) = logits.into_parts();
        // Compute-bound: a checkpointing strategy must never repeat a collective.
        match CrossEntropy.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let (loss, lse) = forward::<B>(logits.clone(), labels.clone(), shard, group);
                prep.finish((logits, lse, labels, shard), loss)
            }
            OpsKind::UnTracked(prep) => prep.finish(forward::<B>(logits, labels, shard, group).0),
        }
    }
}
