//! Mamba-2: a decoder whose blocks are a norm and a Mamba-2 layer, without attention and MLP.

mod config;
mod hf;
mod model;
mod presets;

pub use config::Mamba2Config;
pub use model::Mamba2;
