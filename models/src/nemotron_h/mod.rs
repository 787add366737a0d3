//! Nemotron-H: a decoder whose layers are one mixer each, Mamba-2, attention or an MLP, in an order that a pattern gives.

mod config;
mod hf;
mod model;
mod presets;

pub use config::{HybridLayer, NemotronHConfig};
pub use model::NemotronH;
