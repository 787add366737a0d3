//! CubeCL kernels for transformer training: flash attention, what memory bounds, grouped products, FP8 casts. They know
//! arrays and sizes, no tensors and no ranks. Without the feature `cuda` the crate holds what they share with the host:
//! arithmetic that needs no GPU, such as random numbers that are the same on both.
//!
//! ```
//! use kernels_cubecl::random::{standard_normal, words};
//!
//! // Element `index` of stream 2: a function of seed and place, whoever asks.
//! let normal = |index| standard_normal(words(1234, 2, index));
//! let mean = (0..10_000).map(normal).sum::<f64>() / 1e4;
//! assert!(mean.abs() < 0.05);
//! ```
#![warn(missing_docs)]
// Kernels are written in CubeCL's subset of Rust: no `div_ceil` or `is_multiple_of`, a comptime condition stands apart
// from one at run time, and its macros expand to items without documentation.
#![allow(clippy::manual_div_ceil, clippy::manual_is_multiple_of)]
#![cfg_attr(feature = "cuda", allow(missing_docs, clippy::assign_op_pattern, clippy::collapsible_if))]

pub mod grouped;
pub mod random;
pub mod tiling;

#[cfg(feature = "cuda")]
pub mod attention;
#[cfg(feature = "cuda")]
pub mod fp8;
#[cfg(feature = "cuda")]
pub mod hopper;
#[cfg(feature = "cuda")]
pub mod pointwise;
