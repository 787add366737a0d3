//! Llama: RMSNorm, rotary positions, grouped queries, SwiGLU, no biases; and its relatives, which `variant` tells apart.

mod block;
mod config;
mod hf;
mod model;
mod presets;
mod published;
mod variant;

pub(crate) use block::is_last_of;
pub use config::LlamaConfig;
pub use model::{Frame, Llama};
pub use variant::LlamaVariant;
