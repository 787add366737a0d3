//! Llama: RMSNorm, rotary positions, grouped queries, SwiGLU, no biases. Mistral adds a sliding window, Qwen3 norms of
//! every query and key head.

mod config;
mod hf;
mod model;

pub use config::{LlamaConfig, LlamaVariant};
pub use model::Llama;
