//! LLaVA (Liu et al. 2023, <https://arxiv.org/abs/2310.03744>), as transformers' `LlavaForConditionalGeneration`: CLIP's
//! or SigLIP's image tower, a projector, and a Llama that takes projected patches in place of image tokens.

mod config;
mod decoder;
mod generate;
mod hf;
mod model;

pub use config::LlavaConfig;
pub use decoder::{Decoder, KeyValues};
pub use generate::LlavaCache;
pub use model::Llava;
