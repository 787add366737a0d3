//! GPT-2 and 3: layer norms with biases, learned positions, GELU, biases everywhere.

mod config;
mod hf;
mod model;

pub use config::GptConfig;
pub use model::Gpt;
