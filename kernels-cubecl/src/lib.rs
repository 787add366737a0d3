//! CubeCL kernels for transformer training.
#![warn(missing_docs)]
// Kernels are written in CubeCL's subset of Rust: no `div_ceil` or `is_multiple_of`, a comptime condition stands apart from one at
// run time, and its macros expand to items without documentation.
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
