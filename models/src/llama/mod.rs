//! Llama: RMSNorm, rotary positions, grouped queries, SwiGLU, no biases.

mod config;
mod hf;
mod model;

pub use config::LlamaConfig;
pub use model::Llama;
