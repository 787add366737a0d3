//! The conjugate pairs of tensor and sequence parallelism: each forward exchange with the exchange its gradient needs.
//!
//! Names and pairs as in Megatron-LM (`megatron/core/tensor_parallel/mappings.py`). Sequence-parallel forms act on
//! dimension 0, the sequence; tensor-parallel gathers and scatters on the last. All are the identity in a group of one.

use crate::comm::{Group, ReduceOp};
use crate::exchange::{Exchange, ExchangeOps};
use burn::backend::Dispatch;
use burn::tensor::Tensor;

/// This rank's summand of a sum over a group. Only a reduction can turn it into a value.
#[derive(Clone, Debug)]
pub struct Partial<const D: usize>(Tensor<D>);

impl<const D: usize> Partial<D> {
    /// Declares `x` to be a summand, as the output of a row-parallel matrix product is.
    pub fn new(x: Tensor<D>) -> Self {
        Self(x)
    }
}

/// Before a column-parallel layer: the input is the same on all ranks, each computes a part of its gradient.
pub fn copy_to_tensor_parallel<const D: usize>(x: Tensor<D>, group: &Group) -> Tensor<D> {
    conjugate(x, Exchange::Identity, Exchange::AllReduce(ReduceOp::Sum), group)
}

/// After a row-parallel layer: sums the ranks' parts.
pub fn reduce_from_tensor_parallel<const D: usize>(x: Partial<D>, group: &Group) -> Tensor<D> {
    conjugate(x.0, Exchange::AllReduce(ReduceOp::Sum), Exchange::Identity, group)
}

/// Before a column-parallel layer under sequence parallelism: `[s/tp, ..]` to `[s, ..]`.
pub fn gather_from_sequence_parallel<const D: usize>(x: Tensor<D>, group: &Group) -> Tensor<D> {
    conjugate(x, Exchange::AllGather(0), Exchange::ReduceScatter(0), group)
}

/// After a row-parallel layer under sequence parallelism: sums the ranks' parts and keeps this rank's `[s/tp, ..]`.
pub fn reduce_scatter_to_sequence_parallel<const D: usize>(x: Partial<D>, group: &Group) -> Tensor<D> {
    conjugate(x.0, Exchange::ReduceScatter(0), Exchange::AllGather(0), group)
}

/// Enters the sequence-parallel region with a tensor that is the same on all ranks: `[s, ..]` to `[s/tp, ..]`.
pub fn scatter_to_sequence_parallel<const D: usize>(x: Tensor<D>, group: &Group) -> Tensor<D> {
    conjugate(x, Exchange::Slice(0), Exchange::AllGather(0), group)
}

/// Leaves the sequence-parallel region for computations that every rank repeats: `[s/tp, ..]` to `[s, ..]`; each rank
/// keeps its own part of the gradient, which is the same on all ranks.
pub fn gather_from_sequence_parallel_replicated<const D: usize>(x: Tensor<D>, group: &Group) -> Tensor<D> {
    conjugate(x, Exchange::AllGather(0), Exchange::Slice(0), group)
}

/// After a column-parallel layer whose output all ranks use: `[.., n/tp]` to `[.., n]`.
pub fn gather_from_tensor_parallel<const D: usize>(x: Tensor<D>, group: &Group) -> Tensor<D> {
    conjugate(x, Exchange::AllGather(D - 1), Exchange::Slice(D - 1), group)
}

fn conjugate<const D: usize>(x: Tensor<D>, forward: Exchange, backward: Exchange, group: &Group) -> Tensor<D> {
    if group.size() == 1 {
        return x;
    }
    Tensor::from_dispatch(Dispatch::exchange(x.into_dispatch(), forward, Some(backward), group.clone()))
}
