//! ViT for image classification (Dosovitskiy et al. 2021, <https://arxiv.org/abs/2010.11929>), as transformers'
//! `ViTForImageClassification`, and without a head as its `ViTModel`.

mod config;
mod hf;
mod model;

pub use config::VitConfig;
pub use model::Vit;
