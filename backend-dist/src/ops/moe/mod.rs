//! What a mixture-of-experts layer computes on one rank: rows brought into another order, a matrix for each group of
//! rows, router logits, and auxiliary losses that only exist as gradients.
//!
//! Nothing is scattered: a [`RowMap`] knows its own transpose, so that a gradient too is a sum over rows in a fixed
//! order. The same input gives the same bits, on GPUs as well.

mod api;
mod autodiff;
mod journey;
mod kernels;
mod plain;
mod products;
pub mod routing;
mod rows;
mod travel;

pub use api::{
    all_to_all, gather_rows, grouped_linear, grouped_swiglu_linear, inject, is_quicker_in_two, router_logits,
    row_multiple, through_experts,
};
pub use journey::{Journey, Piece};
pub(in crate::ops) use kernels::MoeKernels;
#[cfg(feature = "cuda")]
pub(in crate::ops) use plain::{groups, router_logits_grads, sum_rows, weighted_swiglu, weighted_swiglu_grads};
pub(in crate::ops) use products::{Part, Products};
pub use rows::RowMap;
pub use travel::Splits;
#[cfg(feature = "cuda")]
pub(in crate::ops) use travel::{Travel, append, below_each_other, exchanged};
