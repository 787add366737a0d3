//! GPT-2 and 3: layer norms with biases, learned positions, GELU, biases everywhere.

mod config;
mod hf;

pub use config::GptConfig;

use crate::decoder::Decoder;

/// A rank's part of a GPT.
pub type Gpt = Decoder<GptConfig>;
