//! Megatron's indexed dataset: tokens in `PREFIX.bin`, and where each sequence and document is, in `PREFIX.idx`.

mod dtype;
mod layout;
mod lock;
mod reader;
#[cfg(test)]
mod tests;
mod writer;

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::refusal::{Access, advice};

pub use dtype::Dtype;
pub use reader::IndexedDataset;
pub use writer::{IndexedSummary, IndexedWriter};

/// Why a `.bin`/`.idx` pair cannot be read or written.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum IndexedError {
    /// The operating system refuses to read.
    #[error("cannot read {}: {cause}{}", path.display(), advice(Access::Read, cause))]
    Read { path: PathBuf, cause: io::Error },
    /// The operating system refuses to write.
    #[error("cannot write {}: {cause}{}", path.display(), advice(Access::Write, cause))]
    Write { path: PathBuf, cause: io::Error },
    /// The index is truncated, inconsistent or not Megatron's.
    #[error("{}: byte {byte}: {what}", path.display())]
    Index { path: PathBuf, byte: usize, what: String },
    /// The tokens do not belong to the index.
    #[error("{}: byte {}: the file ends there, the index describes {expected} bytes", path.display(), found)]
    Tokens { path: PathBuf, found: usize, expected: usize },
    /// A token id does not fit into the element type.
    #[error("{}: token id {value} does not fit into {dtype}", path.display())]
    Value { path: PathBuf, value: i64, dtype: Dtype },
    /// Another program writes the same files.
    #[error(
        "{}: {owner} is writing it; wait for its end, or choose another output (the lock is {})", path.display(), lock.display()
    )]
    Busy { path: PathBuf, owner: String, lock: PathBuf },
    /// More tokens in one sequence than its 32 bit length can say.
    #[error("{}: a sequence of {length} tokens; at most {} are possible, split the document", path.display(), i32::MAX)]
    TooLong { path: PathBuf, length: usize },
}

impl IndexedError {
    pub(super) fn read(path: &Path) -> impl Fn(io::Error) -> Self {
        move |cause| Self::Read { path: path.into(), cause }
    }

    pub(super) fn write(path: &Path) -> impl Fn(io::Error) -> Self {
        move |cause| Self::Write { path: path.into(), cause }
    }
}

/// The digits of a hash.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// `PREFIX.bin` and `PREFIX.idx`; a prefix that already ends in `.bin` or `.idx` is taken without it.
pub fn paths(prefix: &Path) -> (PathBuf, PathBuf) {
    let stem = match prefix.extension() {
        Some(extension) if extension == "bin" || extension == "idx" => prefix.with_extension(""),
        _ => prefix.to_path_buf(),
    };
    (with_suffix(&stem, ".bin"), with_suffix(&stem, ".idx"))
}

/// Appends to the file name; unlike `with_extension` this keeps dots that belong to the prefix.
pub fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    name.into()
}
