//! SigLIP's image tower with its pooling head, and image classification with it (Zhai et al. 2023,
//! <https://arxiv.org/abs/2303.15343>), as transformers' `SiglipVisionModel` and `SiglipForImageClassification`.

mod config;
mod head;
mod hf;
mod model;

pub use config::SiglipConfig;
pub use head::PoolingHead;
pub use model::Siglip;
