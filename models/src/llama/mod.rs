//! Llama: RMSNorm, rotary positions, grouped queries, SwiGLU, no biases. Mistral adds a sliding window, Qwen3 norms of
//! every query and key head.

mod config;
mod hf;
mod model;
mod presets;
mod variant;

pub use config::LlamaConfig;
pub use model::{Frame, Llama};
pub use variant::LlamaVariant;
