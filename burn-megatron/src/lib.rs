//! Megatron-LM in Rust on Burn.

pub mod console;
pub mod metrics;
