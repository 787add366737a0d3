//! Tensor and sequence parallelism: the collectives that have gradients, linear layers with a collective before or after
//! their GEMM, and the cross-entropy and the head of a sharded vocabulary, as in Megatron-LM's
//! `megatron/core/tensor_parallel`.

mod conjugate;
pub(crate) mod cross_entropy;
pub(crate) mod fused;
pub(crate) mod gemm;
pub(crate) mod head;
#[cfg_attr(
    not(any(feature = "cuda", test)),
    expect(dead_code, reason = "CPU ranks do not overlap communication with GEMMs")
)]
pub(crate) mod overlap_schedule;

pub use conjugate::{
    Partial, copy_to_tensor_parallel, gather_from_sequence_parallel, gather_from_sequence_parallel_replicated,
    gather_from_tensor_parallel, reduce_from_tensor_parallel, reduce_scatter_to_sequence_parallel,
    scatter_to_sequence_parallel,
};
