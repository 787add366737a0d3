//! Why a forward pass cannot be done.

use std::path::PathBuf;

use backend_dist::comm::RunError;
use backend_dist::mesh::LayoutError;
use backend_dist::parallelize::PlanError;
use backend_dist::shard::RegistryError;
use models::hf::InputError;
use models::layout::ModelLayoutError;
use models::lora::LoraError;
use models::names::NameError;
use thiserror::Error;

use crate::hf::HfFolderError;

/// Why a forward pass cannot be done.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum ForwardError {
    /// The input file is missing or damaged.
    #[error("{}: {what}", path.display())]
    Input { path: PathBuf, what: String },
    /// The output cannot be written.
    #[error("cannot write {}: {source}", path.display())]
    Output { path: PathBuf, source: safetensors::SafeTensorError },
    /// Tokens or labels are none of the model's.
    #[error("{tensor}[{sequence}, {position}] = {id}; legal: {legal}")]
    Id { tensor: &'static str, sequence: usize, position: usize, id: i64, legal: String },
    /// Gradients need a loss.
    #[error("gradients need a loss: the input has no `labels`")]
    NoLabels,
    /// No label counts.
    #[error("no token has a loss: the label of every token but the first of a sequence is -100")]
    NothingToPredict,
    /// Sequences cannot be divided evenly.
    #[error("--data-parallel {dp} does not divide the input's {sequences} sequences")]
    Sequences { dp: usize, sequences: usize },
    /// A kind of parallelism that only training has.
    #[error("{key} {value} is for training only; nearest legal: {legal}")]
    TrainingOnly { key: &'static str, value: usize, legal: usize },
    /// A kind of parallelism that a forward pass of a plain Burn module does not have.
    #[error("{key} {value}: a forward pass of this model has tensor and sequence parallelism; nearest legal: {legal}")]
    Axis { key: &'static str, value: usize, legal: usize },
    /// No plain Burn module is read from this folder.
    #[error("config.json: `model_type` {found} is no plain Burn module; legal: {legal}")]
    ModelType { found: String, legal: String },
    /// A tensor of the input is not what the model takes.
    #[error(transparent)]
    ModuleInput(#[from] InputError),
    /// Tensor parallelism cannot shard the model.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The model cannot have an adapter.
    #[error(transparent)]
    Lora(#[from] LoraError),
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
