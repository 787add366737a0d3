//! DeepSeek-V3: latent attention, experts chosen by sigmoid scores within groups, shared experts, multi-token
//! prediction, no biases. Moonlight is one of them.

mod block;
mod config;
mod hf;
mod megatron;
mod model;
mod mtp;
mod presets;
mod rows;
#[cfg(test)]
mod tests;

pub use block::LatentBlock;
pub use config::DeepSeekV3Config;
pub use model::DeepSeekV3;
