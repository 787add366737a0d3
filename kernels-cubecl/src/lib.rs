//! CubeCL kernels for transformer training.
#![warn(missing_docs)]

pub mod tiling;

#[cfg(feature = "cuda")]
pub mod attention;
#[cfg(feature = "cuda")]
pub mod hopper;
#[cfg(feature = "cuda")]
pub mod pointwise;
