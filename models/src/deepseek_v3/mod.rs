//! DeepSeek-V3: latent attention, experts chosen by sigmoid scores within groups, shared experts, multi-token
//! prediction, no biases. Moonlight is one of them; DeepSeek-V2 chooses experts by a softmax.

mod block;
mod config;
mod family;
mod hf;
mod presets;
#[cfg(test)]
mod tests;
mod variant;

pub use config::DeepSeekV3Config;
pub(crate) use hf::{balance, seq_aux};
pub use variant::DeepSeekVariant;

use crate::decoder::Decoder;

/// A rank's part of a DeepSeek-V3 or V2.
pub type DeepSeekV3 = Decoder<DeepSeekV3Config>;
