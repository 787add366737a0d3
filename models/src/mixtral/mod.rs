//! Mixtral: a Llama whose MLPs are MoE. Qwen3-MoE adds norms of every query and key head and layers
//! without experts.

mod config;
mod hf;
mod model;
mod presets;
mod variant;

pub use config::MixtralConfig;
pub use model::Mixtral;
pub use variant::MixtralVariant;
