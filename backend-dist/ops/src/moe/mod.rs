//! The operations of an MoE layer on one rank: permuting tokens, grouped GEMMs, router logits, and auxiliary losses
//! that only exist as gradients.
//!
//! There is no scatter: a [`RowMap`] includes its transpose, so that a gradient is a sum over rows in a fixed order
//! too. The same input gives the same bits, on GPUs as well.

mod activation;
mod api;
mod biased;
mod clamped_linear;
mod expert_gemms;
mod expert_pipeline;
mod kernels;
mod operations;
mod plain;
pub mod routing;
mod row_map;
mod token_all_to_all;

pub use activation::ExpertActivation;
pub use api::{
    GroupWeights, all_to_all, gather_rows, grouped_activated_linear, grouped_clamped_linear, grouped_linear, inject,
    is_faster_in_two_chunks, router_logits, row_multiple, through_experts,
};
pub use biased::ClampedSwiGlu;
#[cfg(feature = "cuda")]
pub(crate) use biased::{add_weighted_bias, clamped_swiglu, clamped_swiglu_grads, weighted_bias_grads};
pub(crate) use expert_gemms::{ExpertGemms, ExpertRange};
pub use expert_pipeline::{ExpertChunk, ExpertPipeline};
#[cfg(feature = "cuda")]
pub(crate) use kernels::TokenGroups;
pub(crate) use kernels::{BiasKernels, MoeKernels};
#[cfg(feature = "cuda")]
pub(crate) use plain::{groups, router_logits_grads, sum_rows, weighted_swiglu, weighted_swiglu_grads};
pub use ranks::comm::Splits;
pub use row_map::RowMap;
#[cfg(feature = "cuda")]
pub(crate) use token_all_to_all::{TokenAllToAll, all_to_all_matrices, append_chunk, concat_chunks};
