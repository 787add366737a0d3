//! Errors of datasets.

use std::io;
use std::path::PathBuf;

use indicatif::{HumanBytes, HumanCount};
use thiserror::Error;

use super::indexed::IndexedError;

/// Why a dataset cannot be built.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum DataError {
    /// A `.bin`/`.idx` pair is refused.
    #[error(transparent)]
    Indexed(#[from] IndexedError),
    /// The samples that are wanted cannot be drawn.
    #[error("{}: {what}", path.display())]
    Samples { path: PathBuf, what: String },
    /// The order of the samples does not fit into memory.
    #[error(
        "{}: the order of {} samples takes {} of memory, {} are available; nearest legal: {} samples",
        path.display(), HumanCount(*samples as u64), HumanBytes(*bytes), HumanBytes(*available), HumanCount(*nearest as u64)
    )]
    Order { path: PathBuf, samples: usize, bytes: u64, available: u64, nearest: usize },
    /// The sample order cannot be written to the cache folder.
    #[error("cannot write the sample order to {}: {cause}; choose another cache folder", path.display())]
    Cache { path: PathBuf, cause: io::Error },
    /// A split such as `969,30,1` makes no sense.
    #[error("split '{split}': {what}")]
    Split { split: String, what: String },
    /// A blend such as `0.3 A 0.7 B` makes no sense.
    #[error("blend '{blend}': {what}")]
    Blend { blend: String, what: String },
}
