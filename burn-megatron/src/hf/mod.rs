//! Hugging Face folders: reading one as the source of a model's weights, and writing one.

mod error;
mod folder;
mod generation;
mod numbers;
mod shards;
mod tensors;
mod writer;

pub use error::HfFolderError;
pub use folder::HfFolder;
pub use generation::GenerationConfig;
pub use numbers::Element;
pub use shards::parse_size;
pub use writer::{Companions, TensorReader, Written, export};
