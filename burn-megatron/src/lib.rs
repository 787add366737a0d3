//! Megatron-LM in Rust on Burn: any parallel layout, equal to one device.

pub mod batch;
pub mod bench;
pub mod checkpoint;
pub mod cli;
pub mod config;
pub mod console;
pub mod data;
pub mod doctor;
pub mod element;
pub mod engine;
pub mod flops;
pub mod forward;
pub mod generate;
pub mod hf;
pub mod learner;
pub mod lr;
pub mod metrics;
pub mod optim;
pub mod plan;
pub mod prelude;
pub mod replay;
pub mod schedule;
pub mod trace;
pub mod train;
pub mod verify;
