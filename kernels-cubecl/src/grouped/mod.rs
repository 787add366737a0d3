//! Grouped GEMM on Hopper: groups of rows, each with a matrix of its own, in one launch. A group is an expert of an MoE
//! layer, its rows are the tokens that were dispatched to it.
//!
//! `x [rows, inner]` holds the rows of all groups one after the other, `w [groups · features, inner]` the groups'
//! matrices one below the other. A group has a multiple of [`tiles::ROWS`] rows, so that no tile belongs to two groups:
//! callers pad with rows of zeros. A group may be empty.
//!
//! A cube has two warpgroups of 64 rows each and a plane that issues the TMA loads. It computes tile after tile; the
//! operands of the next tile are loaded while a result is stored.
#![cfg_attr(
    feature = "cuda",
    allow(missing_docs, reason = "the launch macros write public items without documentation")
)]

pub mod tiles;

#[cfg(feature = "cuda")]
mod call;
#[cfg(feature = "cuda")]
mod epilogue;
#[cfg(feature = "cuda")]
pub mod fp8;
#[cfg(feature = "cuda")]
pub mod kernel;
#[cfg(feature = "cuda")]
mod maps;
#[cfg(feature = "cuda")]
mod operand_ring;
#[cfg(feature = "cuda")]
mod plan;

#[cfg(feature = "cuda")]
pub use call::{GroupedCall, GroupedError};
#[cfg(feature = "cuda")]
pub use plan::{Epilogue, Gemm, GroupedPlan};
