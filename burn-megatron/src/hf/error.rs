//! What can be wrong with a Hugging Face folder.

use std::path::{Path, PathBuf};

use backend_dist::launch::BoxError;
use models::hf::HfError;
use thiserror::Error;

use crate::checkpoint::CheckpointError;
use crate::dcp::DcpError;
use crate::refusal::{Access, advice};

/// A folder that cannot be read or written.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum HfFolderError {
    /// The file system says no.
    #[error("cannot {action} {}: {source}{}", path.display(), advice(access(action), source))]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },
    /// There is no `config.json`.
    #[error("{0}")]
    NoConfig(String),
    /// Not the JSON that it should be.
    #[error("{}: {source}", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    /// `config.json` describes a model that we do not have.
    #[error("{}/{source}", folder.display())]
    Config { folder: PathBuf, source: HfError },
    /// There is no `config.json` for a model.
    #[error(transparent)]
    NotWritable(HfError),
    /// A file is not what it claims to be.
    #[error("{}: {what}", path.display())]
    File { path: PathBuf, what: String },
    /// A tensor is missing, unexpected or another one than the configuration needs.
    #[error("{}: tensor `{tensor}` {what}", path.display())]
    Tensor { path: PathBuf, tensor: String, what: String },
    /// A folder of PyTorch's distributed checkpoints cannot be read or written.
    #[error(transparent)]
    Dcp(#[from] DcpError),
    /// Our checkpoint cannot be read or written.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A weight to be written could not be read.
    #[error("weight `{name}`: {source}")]
    Weight { name: String, source: BoxError },
}

impl HfFolderError {
    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { action, path: path.into(), source }
    }

    pub(super) fn file(path: &Path, what: impl Into<String>) -> Self {
        Self::File { path: path.into(), what: what.into() }
    }

    pub(super) fn tensor(path: &Path, tensor: &str, what: impl Into<String>) -> Self {
        Self::Tensor { path: path.into(), tensor: tensor.into(), what: what.into() }
    }
}

/// What was wanted of a file, by what was tried.
fn access(action: &str) -> Access {
    if ["read", "open", "list"].contains(&action) { Access::Read } else { Access::Write }
}
