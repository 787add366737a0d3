//! Why chat data is refused.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::refusal::{Access, advice};

/// Why chat data cannot be used.
#[derive(Debug, Error)]
pub enum ChatError {
    /// The operating system refuses to read, or a compressed file is damaged.
    #[error("cannot read {}: {cause}{}", path.display(), advice(Access::Read, cause))]
    Read {
        /// File.
        path: PathBuf,
        /// Cause.
        cause: io::Error,
    },
    /// The operating system refuses to write.
    #[error("cannot write {}: {cause}{}", path.display(), advice(Access::Write, cause))]
    Write {
        /// File.
        path: PathBuf,
        /// Cause.
        cause: io::Error,
    },
    /// A row cannot be used.
    #[error("{}:{line}: {what}", file.display())]
    Row {
        /// Input file.
        file: PathBuf,
        /// Line of the file, element of its array, or row of its table, from 1.
        line: u64,
        /// The key and what is wrong with it.
        what: String,
    },
    /// The template cannot be used with any row.
    #[error("chat template of {}: {what}", path.display())]
    Template {
        /// File.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The tokenizer cannot be used.
    #[error("tokenizer {}: {what}", path.display())]
    Tokenizer {
        /// File or folder.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The files have nothing to learn from.
    #[error("{what}")]
    Nothing {
        /// Which files, and why not.
        what: String,
    },
}
