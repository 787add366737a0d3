//! Mamba-2: a decoder whose blocks are a norm and a Mamba-2 layer, without attention and MLP.

mod config;
mod family;
mod hf;
mod presets;

pub use config::Mamba2Config;

use crate::decoder::Decoder;

/// A rank's part of a Mamba-2.
pub type Mamba2 = Decoder<Mamba2Config>;
