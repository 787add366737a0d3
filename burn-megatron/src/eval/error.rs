//! Why an evaluation cannot be done.

use std::io;
use std::path::PathBuf;

use backend_dist::mesh::Nearest;
use thiserror::Error;

use crate::data::chat::ChatError;
use crate::forward::ForwardError;
use crate::generate::GenerateError;
use crate::refusal::{Access, advice};

/// Why an evaluation cannot be done.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum EvalError {
    /// A file cannot be read.
    #[error("cannot read {}: {cause}{}", path.display(), advice(Access::Read, cause))]
    Read { path: PathBuf, cause: io::Error },
    /// A row cannot be used, or the file has none.
    #[error(transparent)]
    Rows(#[from] ChatError),
    /// A file has nothing in it.
    #[error("{}: {what}", path.display())]
    Nothing { path: PathBuf, what: &'static str },
    /// A question cannot be asked of this model.
    #[error("{}:{line}: {what}", file.display())]
    Question { file: PathBuf, line: u64, what: String },
    /// The tokenizer cannot be used.
    #[error("tokenizer: {0}")]
    Tokenizer(
        /// What is wrong.
        String,
    ),
    /// Experts on ranks that write different texts.
    #[error(
        "{key} {size}: tasks with a `target` generate texts, whose lengths differ from rank to rank, and {ranks} (tensor-parallel · \
         context-parallel) write the same one; nearest legal: {nearest}"
    )]
    Experts {
        /// The refused size.
        key: &'static str,
        /// Its value.
        size: usize,
        /// Ranks that write the same text.
        ranks: usize,
        /// Legal values.
        nearest: Nearest,
    },
    /// A text is longer than the model generates texts.
    #[error(
        "a context of {prompt} tokens and {new} new ones: the model generates texts in at most {positions} positions; nearest \
         legal: --max-length {positions}"
    )]
    TooLong {
        /// Tokens of the context.
        prompt: usize,
        /// New tokens asked for.
        new: usize,
        /// Positions of the model.
        positions: usize,
    },
    /// A number that must not be 0.
    #[error("{key} 0 is not legal; nearest legal: {nearest}")]
    Zero { key: &'static str, nearest: usize },
    /// Layout and model do not fit, or a rank fails.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// A text cannot be generated.
    #[error(transparent)]
    Generate(#[from] GenerateError),
}
