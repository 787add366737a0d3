//! Llama: RMSNorm, rotary positions, grouped queries, SwiGLU, no biases; and its relatives, which `variant` tells apart.

mod block;
mod config;
mod hf;
mod presets;
mod published;
mod variant;

pub(crate) use block::is_last_of;
pub use config::LlamaConfig;
pub use variant::LlamaVariant;

use crate::decoder::Decoder;

/// A rank's part of a Llama or one of its relatives.
pub type Llama = Decoder<LlamaConfig>;
