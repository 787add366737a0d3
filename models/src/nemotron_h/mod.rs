//! Nemotron-H: a decoder whose layers are one part each, Mamba-2, attention, an MLP or experts (Nemotron 3), in an order
//! that a pattern gives.

mod block;
mod config;
mod family;
mod hf;
mod presets;

pub use config::{HybridLayer, NemotronHConfig};

use crate::decoder::Decoder;

/// A rank's part of a Nemotron-H.
pub type NemotronH = Decoder<NemotronHConfig>;
