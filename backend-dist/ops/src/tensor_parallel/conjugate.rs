//! The conjugate pairs of tensor and sequence parallelism: each forward collective with the collective of its gradient.
//!
//! Names and pairs as in Megatron-LM (`megatron/core/tensor_parallel/mappings.py`). Sequence-parallel forms act on
//! dimension 0, the sequence; tensor-parallel gathers and scatters on the last. All are the identity in a group of one.

use burn::backend::Dispatch;
use burn::tensor::Tensor;
use ranks::collective_ops::{Collective, CollectiveOps};
use ranks::comm::{Group, ReduceOp};

/// This rank's partial sum. Only a reduction over the group turns it into a value.
#[derive(Clone, Debug)]
pub struct Partial<const D: usize>(Tensor<D>);

impl<const D: usize> Partial<D> {
    /// Declares `x` to be a partial sum, as the output of a row-parallel GEMM is.
    pub fn new(x: Tensor<D>) -> Self {
        Self(x)
    }

    /// For what reduces it.
    pub(crate) fn into_inner(self) -> Tensor<D> {
        self.0
    }
}

/// Before a column-parallel layer: the input is the same on all ranks, each computes a part of its gradient.
pub fn copy_to_tensor_parallel<const D: usize>(x: Tensor<D>, group: &Group) -> Tensor<D> {
    conjugate(x, Collective::Identity, Collective::AllReduce(ReduceOp::Sum), group)
}

/// After a row-parallel layer: sums the ranks' partial sums.
pub fn reduce_from_tensor_parallel<const D: usize>(x: Partial<D>, group: &Group) -> Tensor<D> {
    conjugate(x.0, Collective::AllReduce(ReduceOp::Sum), Collective::Identity, group)
}

/// Before a column-parallel layer under sequence parallelism: `[s/tp, ..]` to `[s, ..]`.
pub fn gather_from_sequence_parallel<const D: usize>(x: Tensor<D>, group: &Group) -> Tensor<D> {
    conjugate(x, Collective::AllGather(0), Collective::ReduceScatter(0), group)
}

/// After a row-parallel layer under sequence parallelism: sums the partial sums and returns this rank's shard `[s/tp,
/// ..]`.
pub fn reduce_scatter_to_sequence_parallel<const D: usize>(x: Partial<D>, group: &Group) -> Tensor<D> {
    conjugate(x.0, Collective::ReduceScatter(0), Collective::AllGather(0), group)
}

/// Enters the sequence-parallel region with a tensor that is the same on all ranks: `[s, ..]` to `[s/tp, ..]`.
pub fn scatter_to_sequence_parallel<const D: usize>(x: Tensor<D>, group: &Group) -> Tensor<D> {
    conjugate(x, Collective::Slice(0), Collective::AllGather(0), group)
}

/// Leaves the sequence-parallel region for computations that every rank repeats: `[s/tp, ..]` to `[s, ..]`. The
/// gradient is the same on all ranks; each takes its shard of it.
pub fn gather_from_sequence_parallel_replicated<const D: usize>(x: Tensor<D>, group: &Group) -> Tensor<D> {
    conjugate(x, Collective::AllGather(0), Collective::Slice(0), group)
}

/// After a column-parallel layer whose output all ranks use: `[.., n/tp]` to `[.., n]`.
pub fn gather_from_tensor_parallel<const D: usize>(x: Tensor<D>, group: &Group) -> Tensor<D> {
    conjugate(x, Collective::AllGather(D - 1), Collective::Slice(D - 1), group)
}

fn conjugate<const D: usize>(x: Tensor<D>, forward: Collective, backward: Collective, group: &Group) -> Tensor<D> {
    if group.size() == 1 {
        return x;
    }
    Tensor::from_dispatch(Dispatch::collective(x.into_dispatch(), forward, Some(backward), group.clone()))
}
