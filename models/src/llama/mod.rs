//! Llama: RMSNorm, rotary positions, grouped queries, SwiGLU, no biases; and its relatives, which `variant` tells apart.

mod block;
mod config;
mod hf;
mod model;
mod presets;
mod variant;

pub use config::LlamaConfig;
pub use model::{Frame, Llama};
pub use variant::LlamaVariant;
