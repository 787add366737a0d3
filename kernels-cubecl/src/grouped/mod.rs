//! Products of groups of rows, each with a matrix of its own, in one launch on Hopper: the experts of a mixture.
//!
//! `x [rows, inner]` holds the rows of all groups one after the other, `w [groups · features, inner]` the groups'
//! matrices below each other. A group has a multiple of [`tiles::ROWS`] rows, so that no tile knows two groups: callers
//! fill up with rows of zeros. A group may be empty.
//!
//! A cube has two warpgroups of 64 rows each and a plane that drives the copy engine. It computes tile after tile; the
//! tiles of the next one are on their way while a result goes to memory.
#![cfg_attr(
    feature = "cuda",
    allow(missing_docs, reason = "the launch macros write public items without documentation")
)]

pub mod tiles;

#[cfg(feature = "cuda")]
mod call;
#[cfg(feature = "cuda")]
mod copy;
#[cfg(feature = "cuda")]
pub mod kernel;
#[cfg(feature = "cuda")]
mod maps;
#[cfg(feature = "cuda")]
mod output;
#[cfg(feature = "cuda")]
mod plan;
#[cfg(feature = "cuda")]
mod waves;

#[cfg(feature = "cuda")]
pub use call::{GroupedCall, GroupedError};
#[cfg(feature = "cuda")]
pub use plan::{GroupedPlan, Onto, Product};
#[cfg(feature = "cuda")]
pub use waves::in_waves;
