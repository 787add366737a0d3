#![warn(missing_docs)]
//! Tensor- and sequence-parallel layers for Burn, and the model families built from them.

pub mod causal_lm;
pub mod config;
pub mod deepseek_v3;
pub mod family;
pub mod fp8;
pub mod gpt;
pub mod hf;
pub mod layers;
pub mod layout;
pub mod llama;
mod megatron;
pub mod micro_batch;
pub mod mixtral;
pub mod names;
pub mod param;
pub mod part;
pub mod recompute;

pub use causal_lm::{CausalLm, ModelConfig};
pub use config::ConfigError;
pub use deepseek_v3::{DeepSeekV3, DeepSeekV3Config};
pub use family::{FamilyConfig, WithModel};
pub use fp8::Fp8Config;
pub use gpt::{Gpt, GptConfig};
pub use layers::KvCache;
pub use llama::{Llama, LlamaConfig, LlamaVariant};
pub use micro_batch::MicroBatch;
pub use mixtral::{Mixtral, MixtralConfig, MixtralVariant};
pub use param::{BuildError, ParamBuilder, WeightSource};
pub use part::Part;
pub use recompute::Recompute;
