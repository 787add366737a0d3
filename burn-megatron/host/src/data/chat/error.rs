//! Why chat data is refused.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::refusal::{Access, advice};

/// Why chat data cannot be used.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum ChatError {
    /// The operating system refuses to read, or a compressed file is damaged.
    #[error("cannot read {}: {cause}{}", path.display(), advice(Access::Read, cause))]
    Read { path: PathBuf, cause: io::Error },
    /// The operating system refuses to write.
    #[error("cannot write {}: {cause}{}", path.display(), advice(Access::Write, cause))]
    Write { path: PathBuf, cause: io::Error },
    /// A row cannot be used.
    #[error("{}:{line}: {what}", file.display())]
    Row { file: PathBuf, line: u64, what: String },
    /// The template cannot be used with any row.
    #[error("chat template of {}: {what}", path.display())]
    Template { path: PathBuf, what: String },
    /// The tokenizer cannot be used.
    #[error("tokenizer {}: {what}", path.display())]
    Tokenizer { path: PathBuf, what: String },
    /// The files have nothing to learn from.
    #[error("{what}")]
    Nothing { what: String },
}

/// What reads conversations.
pub type Result<T, E = ChatError> = std::result::Result<T, E>;
