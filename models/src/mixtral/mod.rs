//! Mixtral: a Llama whose MLPs are MoE. Qwen3-MoE adds norms of every query and key head and layers
//! without experts, Qwen3-Next linear attention, GLM-4.5 DeepSeek-V3's router.

mod block;
mod config;
mod deepseek;
mod family;
mod glm;
mod hf;
mod keys;
mod linear;
mod predictors;
mod presets;
mod variant;

pub use config::MixtralConfig;
pub use variant::MixtralVariant;

use crate::decoder::Decoder;

/// A rank's part of a Mixtral or one of its relatives.
pub type Mixtral = Decoder<MixtralConfig>;
