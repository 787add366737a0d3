//! Megatron-LM in Rust on Burn.

pub mod cli;
pub mod data;
