//! Megatron-LM in Rust on Burn: any parallel layout, equal to one device.

pub mod batch;
pub mod cli;
pub mod data;
pub mod engine;
pub mod flops;
pub mod lr;
pub mod optim;
pub mod replay;
pub mod verify;
