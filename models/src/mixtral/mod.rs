//! Mixtral: a Llama whose MLPs are MoE. Qwen3-MoE adds norms of every query and key head and layers
//! without experts, Qwen3-Next linear attention.

mod config;
mod hf;
mod keys;
mod linear;
mod model;
mod presets;
mod variant;

pub use config::MixtralConfig;
pub use model::Mixtral;
pub use variant::MixtralVariant;
