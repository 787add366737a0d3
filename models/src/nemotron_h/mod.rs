//! Nemotron-H: a decoder whose layers are one mixer each, Mamba-2, attention or an MLP, in an order that a pattern gives.

mod config;
mod hf;
mod presets;

pub use config::{HybridLayer, NemotronHConfig};

use crate::decoder::Decoder;

/// A rank's part of a Nemotron-H.
pub type NemotronH = Decoder<NemotronHConfig>;
