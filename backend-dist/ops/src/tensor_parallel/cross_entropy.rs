//! Cross-entropy over a vocabulary sharded among ranks, after Megatron-LM's
//! `megatron/core/tensor_parallel/cross_entropy.py`: the logits of a token are never gathered on one rank.

use burn::backend::{
    Slice, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{Int, Tensor};

use crate::{
    kernels::LocalKernels,
    operation::{Tensors, apply_with, operation},
};
use ranks::collective_ops::{Collective, CollectiveOps};
use ranks::comm::{Group, ReduceOp};

/// The shard of the vocabulary whose logits this rank holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VocabShard {
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
    let operation = CrossEntropy { shard, group: group.clone() };
    apply_with(operation, [logits.into_dispatch()], Tensors::ints([labels.into_dispatch()]))
}

/// Loss and log-sum-exp, both `[s, b]`.
pub(crate) fn forward<B: LocalKernels + CollectiveOps>(
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

operation! {
    /// The constants are the labels.
    CrossEntropy { shard: VocabShard, group: Group }, 1, (FloatTensor<B>, FloatTensor<B>, IntTensor<B>, VocabShard),
    |[logits], Tensors { ints, .. }, tracked| {
        let labels = ints.into_iter().next().expect("labels");
        let saved = tracked.then(|| (logits.clone(), labels.clone()));
        let (loss, lse) = forward::<B>(logits, labels, shard, group);
        (loss, saved.map(|(logits, labels)| (logits, lse, labels, shard)))
    },
    |(logits, lse, labels, shard), grad, parents| {
        parents.register::<B>([B::vocab_logits_grad(logits, lse, labels, grad, shard.first_row, shard.valid)]);
    },
}
