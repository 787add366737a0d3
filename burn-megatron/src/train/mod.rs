//! A training run from its configuration, as `burn-megatron train` does it.
//!
//! [`Plan`] checks a run and tells what it would do; [`train`] opens its data ([`RunData`]) and does it.

mod data;
mod launch;
mod plan;
mod resume;
#[cfg(test)]
mod tests;

use std::io;
use std::path::PathBuf;

use backend_dist::mesh::LayoutError;
use burn::tensor::Device;
use thiserror::Error;

use crate::config::ConfigErrors;
use crate::data::DataError;
use crate::data::preprocess::{PreprocessError, Progress};
pub use data::RunData;
pub use launch::Outcome;
pub(crate) use launch::stage_builder;
pub use plan::Plan;
pub use resume::Start;

/// Why a run did not start, or did not end well.
#[derive(Debug, Error)]
pub enum TrainError {
    /// The configuration, or what it names, is wrong.
    #[error(transparent)]
    Config(#[from] ConfigErrors),
    /// The ranks cannot be laid out.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Text cannot be tokenized.
    #[error("data.text: {0}")]
    Text(#[from] PreprocessError),
    /// A data set cannot be opened.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The operating system refused.
    #[error("{}: {cause}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// Cause.
        cause: io::Error,
    },
    /// A tokenizer cannot be used.
    #[error("data.tokenizer = {}: {what}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// Why not.
        what: String,
    },
    /// The tokenizer has tokens that the model does not have.
    #[error("{} has {tokens} tokens, but model.vocab-size = {vocabulary}; nearest legal: {tokens}", path.display())]
    Vocabulary {
        /// The tokenizer's file.
        path: PathBuf,
        /// Tokens of the tokenizer.
        tokens: usize,
        /// Tokens of the model.
        vocabulary: usize,
    },
    /// The data has a token that the model does not have.
    #[error(
        "row {row} of the {part} data has token {id}, but model.vocab-size = {vocabulary}: they do not belong together"
    )]
    Token {
        /// Name of the part.
        part: &'static str,
        /// Index of the row.
        row: usize,
        /// The token.
        id: i64,
        /// Tokens of the model.
        vocabulary: usize,
    },
    /// A part of the data has not even one row.
    #[error(
        "there is no {part} row of {seq_length} + 1 tokens; give it a larger share in data.split, more data, or a \
         smaller training.seq-length"
    )]
    NoRow {
        /// Name of the part.
        part: &'static str,
        /// Tokens of a row.
        seq_length: usize,
    },
    /// The training failed; what went wrong was printed when the ranks stopped.
    #[error("the training failed")]
    Failed,
}

/// Trains as planned, rank `r` on `devices[r % devices.len()]`. `progress` is told how far the tokenizing of text is.
///
/// # Errors
/// See [`TrainError`].
pub fn train(
    plan: &Plan,
    devices: Vec<Device>,
    progress: &mut (dyn FnMut(Progress) + Send),
) -> Result<Outcome, TrainError> {
    let data = RunData::open(plan.config(), progress)?;
    let launch = launch::Launch { plan, devices, data };
    plan.config().model.config.visit(launch)
}
