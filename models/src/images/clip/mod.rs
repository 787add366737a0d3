//! The image tower of CLIP (Radford et al. 2021, <https://arxiv.org/abs/2103.00020>), as transformers'
//! `CLIPVisionModel`.

mod config;
mod model;

pub use config::ClipVisionConfig;
pub use model::ClipVision;
