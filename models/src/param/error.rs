//! What can go wrong while a model is built.

use backend_dist::launch::BoxError;
use backend_dist::shard::RegistryError;
use thiserror::Error;

use crate::config::ConfigError;
use crate::layout::ModelLayoutError;
use crate::lora::LoraError;

/// Why a model cannot be built.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum BuildError {
    /// The model's sizes contradict each other.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The model does not fit the layout.
    #[error(transparent)]
    Layout(#[from] ModelLayoutError),
    /// Experts in FP8 do not fit the layout.
    #[error("experts in FP8: {0}, or take fp8.experts = false")]
    Fp8Experts(String),
    /// Two parameters have the same name.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// A layer cannot have the adapter that it should have.
    #[error(transparent)]
    Lora(#[from] LoraError),
    /// Tensors that make up one parameter, of which only some are to be frozen.
    #[error("`{frozen}` is to be frozen, but it is one parameter with `{other}`: freeze both or neither")]
    HalfFrozen { frozen: String, other: String },
    /// A weight could not be read from its source.
    #[error("weight `{name}`: {source}")]
    Weight { name: String, source: BoxError },
}

/// What builds models and their layers.
pub type Result<T, E = BuildError> = std::result::Result<T, E>;
