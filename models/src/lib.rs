//! Tensor- and sequence-parallel layers for Burn, and the model families built from them.
//!
//! A model is written as for one device; its layers shard the weights and communicate. Initial weights are a function of
//! the seed, so every layout has the same loss:
//!
//! ```
//! use backend_dist::{launch::launch, mesh::Mesh};
//! use burn::tensor::{Device, FloatDType, Int, Tensor};
//! use models::{CausalLm, Llama, LlamaConfig, ParamBuilder};
//!
//! let loss = |layout: &str| -> Result<Vec<f64>, backend_dist::launch::BoxError> {
//!     Ok(launch(&Mesh::new(layout.parse()?)?, &[Device::flex()], |rank| {
//!         let model = Llama::build(&LlamaConfig::tiny(), ParamBuilder::new(&rank, FloatDType::F64, 1234))?;
//!         // One sequence of four tokens, `[batch, sequence]`, the same on both ranks of a tensor parallel group.
//!         let [tokens, labels] = [[5, 6, 7, 8], [6, 7, 8, 9]];
//!         let tensor = |ids: [i64; 4]| Tensor::<2, Int>::from_data([ids], &rank.device);
//!         Ok(model.token_losses(tensor(tokens), tensor(labels)).sum().into_scalar::<f64>())
//!     })?)
//! };
//! assert!((loss("TP2 SP")?[0] - loss("TP1")?[0]).abs() < 1e-12);
//! # Ok::<(), backend_dist::launch::BoxError>(())
//! ```
//!
//! [`layers`] has the parallel layers. A family is a [`ModelConfig`], which is plain data, and a [`CausalLm`] that a
//! [`ParamBuilder`] gives its weights; [`FamilyConfig`] is one that is known only when the program runs.

#![warn(missing_docs)]

mod activation;
pub mod causal_lm;
pub mod config;
mod decoder;
pub mod deepseek_v3;
pub mod encoders;
pub mod family;
pub mod fp8;
mod frame;
pub mod gpt;
pub mod hf;
pub mod images;
pub mod layers;
pub mod layout;
mod limits;
pub mod llama;
pub mod lora;
pub mod mamba2;
mod megatron;
pub mod micro_batch;
pub mod mixtral;
pub mod names;
pub mod nemotron_h;
pub mod observer;
pub mod param;
pub mod part;

pub use activation::Activation;
pub use causal_lm::{CausalLm, ModelConfig, UnsharedPrefixes};
pub use config::ConfigError;
pub use decoder::Decoder;
pub use deepseek_v3::{DeepSeekV3, DeepSeekV3Config, DeepSeekVariant};
pub use encoders::{Bert, BertConfig, T5, T5Config};
pub use family::{Family, FamilyConfig, WithModel};
pub use fp8::Fp8Config;
pub use frame::{DecoderConfig, Frame};
pub use gpt::{Gpt, GptConfig};
pub use layers::PagedKvCache;
pub use layouts::recompute::{self, Recompute};
pub use limits::limit as size_limit;
pub use llama::{Llama, LlamaConfig, LlamaVariant};
pub use lora::{LoraConfig, LoraPlan};
pub use mamba2::{Mamba2, Mamba2Config};
pub use micro_batch::MicroBatch;
pub use mixtral::{Mixtral, MixtralConfig, MixtralVariant};
pub use nemotron_h::{NemotronH, NemotronHConfig};
pub use param::{BuildError, ParamBuilder, WeightSource};
pub use part::Part;
