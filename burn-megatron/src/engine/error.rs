//! Why a step could not be done.

use super::{Anomaly, ContextError};
use crate::batch::BatchError;
use crate::lr::{LrError, WeightDecayError};
use crate::optim::OptimError;
use crate::schedule::PipelineError;
use crate::schedule::dynamic_context::TooLong;
use backend_dist::mesh::Coords;
use models::layout::ModelLayoutError;
use std::sync::Arc;

/// Errors of the engine. After one, parameters and optimizer states are those of the last finished step.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum EngineError {
    /// The loss of a micro-batch is NaN or infinite.
    #[error(
        "loss {loss} in step {step}, micro-batch {micro_batch}, on rank {rank} ({coords}); parameters are those of the last finished step"
    )]
    NonFiniteLoss { loss: f64, step: u64, micro_batch: usize, rank: usize, coords: Coords },
    /// The global gradient norm is NaN or infinite while every loss was finite.
    #[error("gradient norm {norm} in step {step} with loss {loss}; parameters are those of the last finished step")]
    NonFiniteGradient { norm: f64, loss: f64, step: u64 },
    /// A step that [`AnomalyConfig`](super::AnomalyConfig) does not let pass.
    #[error("step {step}: {anomaly}; parameters are those of the last finished step")]
    Anomaly { anomaly: Anomaly, step: u64 },
    /// A batch does not have as many sequences as the configuration says.
    #[error("the batch has {given} sequences, `global-batch` says {expected}")]
    Sequences { given: usize, expected: usize },
    /// A batch has a token that the model does not have.
    #[error(
        "{what} {id} at position {position} of sequence {sequence} of a batch is no token of the model's {vocabulary}: data and model do not \
         belong together"
    )]
    Token { what: &'static str, id: i64, position: usize, sequence: usize, vocabulary: usize },
    /// The batch sizes do not divide.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// The learning rate is not valid.
    #[error(transparent)]
    LearningRate(#[from] LrError),
    /// A moving average of weights whose masters are in host memory.
    #[error(
        "`ema_decay` with `cpu_offload`: the average follows master weights that are on the GPU; leave one of both"
    )]
    AverageOffload,
    /// The weight decay is not valid.
    #[error(transparent)]
    WeightDecay(#[from] WeightDecayError),
    /// Module and registry disagree.
    #[error(transparent)]
    Optimizer(#[from] OptimError),
    /// Ranks cannot share sequences of this length.
    #[error(transparent)]
    Sequence(#[from] ModelLayoutError),
    /// Attention cannot be shared as the configuration says.
    #[error(transparent)]
    Context(#[from] ContextError),
    /// A document is too long for all ranks together.
    #[error(transparent)]
    TooLong(#[from] TooLong),
    /// Layers and schedule do not fit the layout.
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
    /// A stage of the model cannot be built.
    #[error("the model cannot be built: {0}")]
    Model(Arc<str>),
}
