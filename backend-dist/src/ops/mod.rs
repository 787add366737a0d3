//! Operations with autodiff for parallel layers.

pub mod conjugate;
