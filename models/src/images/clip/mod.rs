//! The image towers of CLIP (Radford et al. 2021, <https://arxiv.org/abs/2103.00020>) and of SigLIP (Zhai et al. 2023,
//! <https://arxiv.org/abs/2303.15343>), as transformers' `CLIPVisionModel` and `SiglipVisionModel`.

mod config;
mod model;

pub use config::{ClipVisionConfig, VisionFamily};
pub use model::ClipVision;
