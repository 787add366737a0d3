//! Why images cannot be used.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::refusal::{Access, advice};

/// Why images cannot be used.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum ImageError {
    /// A `preprocessor_config.json` that is not one, or asks for something else.
    #[error("preprocessor_config.json: {0}")]
    Config(String),
    /// A file that cannot be read.
    #[error("cannot read {}: {source}{}", path.display(), advice(Access::Read, source))]
    Read { path: PathBuf, source: io::Error },
    /// A tokenizer that cannot be used.
    #[error("data.tokenizer = {}: {what}", path.display())]
    Tokenizer { path: PathBuf, what: String },
    /// A list of another kind.
    #[error("{}: legal: a .jsonl file of images, or a .tar file", path.display())]
    Kind { path: PathBuf },
    /// Samples that cannot be used, of which there shall be none.
    #[error(
        "{} of {samples} samples cannot be used; the first: {}; correct the data, or ask for such samples to be skipped",
        unusable.len(), unusable.first().map_or("", String::as_str)
    )]
    Unusable { unusable: Vec<String>, samples: usize },
    /// An image that begins like one and does not decode.
    #[error("{place} {what}")]
    Image { place: String, what: String },
    /// Nothing to learn from.
    #[error("{}: no sample is left", path.display())]
    Empty { path: PathBuf },
}
