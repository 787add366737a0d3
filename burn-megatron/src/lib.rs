//! Megatron-LM in Rust on Burn: any parallel layout, equal to one device.
//!
//! This is the crate to depend on. [`learner`] trains, models of [`models`] in any layout and any Burn module over
//! data-parallel ranks; `cli` (a feature, on by default) is the `burn-megatron` program; [`plan`] says what
//! a layout needs before anything starts.
//!
//! ```no_run
//! use std::sync::Arc;
//! use burn::tensor::FloatDType;
//! use burn_megatron::{data::TokensInMemory, prelude::*};
//!
//! let config = LlamaConfig::tiny();
//! let tokens: Vec<i64> = (0..100_000).map(|i| i * i % 97).collect();
//! let data = Arc::new(TokensInMemory::new(tokens, 64));
//! let mesh = Mesh::new("TP2 SP PP2 DP2".parse()?)?;
//! let (recipe, dims) = (EngineConfig::new(2, 16, LrConfig::constant(1e-3)), config.dims());
//! let run = Pretraining::new(mesh, recipe, 100, (data.clone(), data), dims, move |rank, part| {
//!     Ok(Llama::build(&config, ParamBuilder::new(rank, FloatDType::F32, 1234).with_part(part))?)
//! });
//! let (training, learner) = run.supervised();
//! training.launch(learner);
//! # Ok::<(), BoxError>(())
//! ```

#[doc(inline)]
pub use host::{
    batch, block_pool, checkpoint, data, dcp, element, flops, grpo, json_grammar, logits, lr, preference, quantise,
    schedule, trace,
};
use host::{host_memory, local_time, positioned, refusal, safetensors_header};
#[doc(inline)]
pub use planner as plan;

#[cfg(test)]
#[macro_use]
#[path = "../tests/support/says.rs"]
mod says;

pub mod bench;
pub mod calibrate;
#[cfg(feature = "cli")]
pub mod cli;
pub mod config;
pub mod console;
pub mod doctor;
pub mod engine;
pub mod eval;
pub mod forward;
pub mod generate;
pub mod hf;
pub mod learner;
pub mod metrics;
pub mod optim;
pub mod plan_module;
pub mod prelude;
pub mod prune;
pub mod replay;
pub mod serve;
pub mod train;
pub mod verify;
pub mod verify_module;
