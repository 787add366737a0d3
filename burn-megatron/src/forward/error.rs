//! Why a forward pass cannot be done.

use std::path::PathBuf;

use backend_dist::comm::RunError;
use backend_dist::mesh::LayoutError;
use backend_dist::parallelize::PlanError;
use backend_dist::shard::RegistryError;
use models::hf::InputError;
use models::layout::ModelLayoutError;
use models::names::NameError;
use thiserror::Error;

use crate::hf::HfFolderError;

/// Why a forward pass cannot be done.
#[derive(Debug, Error)]
pub enum ForwardError {
    /// The input file is missing or damaged.
    #[error("{}: {what}", path.display())]
    Input {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The output cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Output {
        /// The file.
        path: PathBuf,
        /// Why.
        source: safetensors::SafeTensorError,
    },
    /// Tokens or labels are none of the model's.
    #[error("{tensor}[{sequence}, {position}] = {id}; legal: {legal}")]
    Id {
        /// `input_ids` or `labels`.
        tensor: &'static str,
        /// Sequence of the batch.
        sequence: usize,
        /// Position in the sequence.
        position: usize,
        /// The token.
        id: i64,
        /// What it may be.
        legal: String,
    },
    /// Gradients need a loss.
    #[error("gradients need a loss: the input has no `labels`")]
    NoLabels,
    /// No label counts.
    #[error("no token has a loss: the label of every token but the first of a sequence is -100")]
    NothingToPredict,
    /// Sequences cannot be divided evenly.
    #[error("--data-parallel {dp} does not divide the input's {sequences} sequences")]
    Sequences {
        /// Data parallel ranks.
        dp: usize,
        /// Sequences of the input.
        sequences: usize,
    },
    /// A kind of parallelism that only training has.
    #[error("{key} {value} is for training only; nearest legal: {legal}")]
    TrainingOnly {
        /// Name of the size, as its flag is spelled.
        key: &'static str,
        /// The refused size.
        value: usize,
        /// The only size that one forward and backward pass has.
        legal: usize,
    },
    /// A kind of parallelism that a forward pass of a plain Burn module does not have.
    #[error("{key} {value}: `forward` of this model has tensor and sequence parallelism; nearest legal: {legal}")]
    Axis {
        /// Name of the size, as its flag is spelled.
        key: &'static str,
        /// The refused size.
        value: usize,
        /// The only size that it can have.
        legal: usize,
    },
    /// No plain Burn module is read from this folder.
    #[error("config.json: `model_type` {found} is no plain Burn module; legal: {legal}")]
    ModelType {
        /// `model_type`.
        found: String,
        /// Those that are.
        legal: String,
    },
    /// A tensor of the input is not what the model takes.
    #[error(transparent)]
    ModuleInput(#[from] InputError),
    /// Tensor parallelism cannot shard the model.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The folder cannot be read.
    #[error(transparent)]
    Folder(#[from] HfFolderError),
    /// The layout is illegal.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The model does not fit the layout.
    #[error(transparent)]
    Model(#[from] ModelLayoutError),
    /// A rank failed.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A shard of a gradient is on no rank.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// A gradient has no name in Hugging Face's model.
    #[error(transparent)]
    Names(#[from] NameError),
}
