//! Megatron-LM in Rust on Burn.

pub mod console;
pub mod learner;
pub mod metrics;
pub mod prelude;
