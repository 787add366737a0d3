//! DeepSeek-V3: latent attention, experts chosen by sigmoid scores within groups, shared experts, multi-token
//! prediction, no biases. Moonlight is one of them.

mod block;
mod config;
mod family;
mod hf;
mod presets;
#[cfg(test)]
mod tests;

pub use config::DeepSeekV3Config;

use crate::decoder::Decoder;

/// A rank's part of a DeepSeek-V3.
pub type DeepSeekV3 = Decoder<DeepSeekV3Config>;
