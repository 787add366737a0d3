//! Why images cannot be used.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::refusal::{Access, advice};

/// Why images cannot be used.
#[derive(Debug, Error)]
pub enum ImageError {
    /// A `preprocessor_config.json` that is not one, or asks for something else.
    #[error("preprocessor_config.json: {0}")]
    Config(String),
    /// A file that cannot be read.
    #[error("cannot read {}: {source}{}", path.display(), advice(Access::Read, source))]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A list of another kind.
    #[error("{}: legal: a .jsonl file of images, or a .tar file", path.display())]
    Kind {
        /// The file.
        path: PathBuf,
    },
    /// Samples that cannot be used, of which there shall be none.
    #[error(
        "{} of {samples} samples cannot be used; the first: {}; correct the data, or ask for such samples to be skipped",
        unusable.len(), unusable.first().map_or("", String::as_str)
    )]
    Unusable {
        /// Each with its place: file and line, or file and member.
        unusable: Vec<String>,
        /// All samples.
        samples: usize,
    },
    /// An image that begins like one and does not decode.
    #[error("{place} {what}")]
    Image {
        /// File and line, or file and member.
        place: String,
        /// What is wrong.
        what: String,
    },
    /// Nothing to learn from.
    #[error("{}: no sample is left", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
}
