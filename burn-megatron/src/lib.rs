//! Megatron-LM in Rust on Burn.

pub mod cli;
pub mod console;
pub mod data;
pub mod learner;
pub mod metrics;
pub mod prelude;
