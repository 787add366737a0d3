#![warn(missing_docs)]
//! Tensor- and sequence-parallel layers for Burn, and the model families built from them.

pub mod layout;
pub mod param;
