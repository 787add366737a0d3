//! Errors of datasets.

use std::io;
use std::path::PathBuf;

use indicatif::{HumanBytes, HumanCount};
use thiserror::Error;

use super::indexed::IndexedError;

/// Why a dataset cannot be built.
#[derive(Debug, Error)]
pub enum DataError {
    /// A `.bin`/`.idx` pair is refused.
    #[error(transparent)]
    Indexed(#[from] IndexedError),
    /// The samples that are wanted cannot be drawn.
    #[error("{}: {what}", path.display())]
    Samples {
        /// The `.bin` file.
        path: PathBuf,
        /// Why not.
        what: String,
    },
    /// The order of the samples does not fit into memory.
    #[error(
        "{}: the order of {} samples takes {} of memory, {} are available; nearest legal: {} samples",
        path.display(), HumanCount(*samples as u64), HumanBytes(*bytes), HumanBytes(*available), HumanCount(*nearest as u64)
    )]
    Order {
        /// The `.bin` file.
        path: PathBuf,
        /// Samples wanted.
        samples: usize,
        /// Bytes of their order.
        bytes: u64,
        /// Bytes that are available.
        available: u64,
        /// Samples whose order fits.
        nearest: usize,
    },
    /// The sample order cannot be written to the cache folder.
    #[error("cannot write the sample order to {}: {cause}; choose another cache folder", path.display())]
    Cache {
        /// The cache file.
        path: PathBuf,
        /// Cause.
        cause: io::Error,
    },
    /// A split such as `969,30,1` makes no sense.
    #[error("split '{split}': {what}")]
    Split {
        /// As given.
        split: String,
        /// What is wrong.
        what: String,
    },
    /// A blend such as `0.3 A 0.7 B` makes no sense.
    #[error("blend '{blend}': {what}")]
    Blend {
        /// As given.
        blend: String,
        /// What is wrong.
        what: String,
    },
}
