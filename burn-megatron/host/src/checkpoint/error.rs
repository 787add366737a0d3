//! Why a checkpoint cannot be written or read.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use indicatif::HumanBytes;
use safetensors::Dtype;
use thiserror::Error;

use super::Kind;
use crate::refusal::{Access, advice};

/// Why a checkpoint cannot be written or read; nothing that is in use has been changed.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum CheckpointError {
    /// The disk refuses.
    #[error("cannot {action} {}: {cause}{}", path.display(), what_to_do(action, cause))]
    Io { action: &'static str, path: PathBuf, cause: Arc<io::Error> },
    /// The disk was full during a write.
    #[error(
        "cannot write {}: the disk is full; the file needs {}, {} are free; delete old checkpoints, or set keep-last lower",
        path.display(), HumanBytes(*needed), HumanBytes(*free)
    )]
    Full { path: PathBuf, needed: u64, free: u64 },
    /// A storage refuses.
    #[error("cannot {action} {what}: {cause}")]
    Storage { action: &'static str, what: String, cause: Arc<io::Error> },
    /// The disk will be full during the run.
    #[error(
        "{}: {count} checkpoint{} {} more than is there, {} are free; free some space, set keep-last lower, or \
         choose another folder",
        root.display(),
        if *count == 1 { format!(" of {} needs", HumanBytes(*each)) } else { format!("s of {} need", HumanBytes(*each)) },
        HumanBytes(*needed), HumanBytes(*free)
    )]
    Space { root: PathBuf, count: u64, each: u64, needed: u64, free: u64 },
    /// Another run saves to the same folder.
    #[error(
        "{key} = {} is in use by another run ({holder}); wait for it to end, or choose another folder",
        root.display()
    )]
    Locked { root: PathBuf, holder: String, key: &'static str },
    /// Another run copies to the same storage.
    #[error(
        "checkpoint.storage = {storage} belongs to another run ({owner}): choose another storage; if that run is over, delete \
         {storage}/{file}"
    )]
    Owned { storage: String, owner: String, file: &'static str },
    /// An option makes no sense.
    #[error("{option} {value}: {what}")]
    Option { option: &'static str, value: String, what: String },
    /// A slice that was handed over cannot be saved.
    #[error("writer {writer}, step {step}: tensor `{key}` cannot be saved: {what}")]
    Slice { writer: usize, step: u64, key: String, what: String },
    /// The writers do not agree, or one is missing.
    #[error("step {step} is not saved: {what}")]
    Writers { step: u64, what: String },
    /// There is no checkpoint.
    #[error("there is no checkpoint in {}: {what}", path.display())]
    NotFound { path: PathBuf, what: String },
    /// There are checkpoints, but all of them are damaged or incomplete.
    #[error(
        "{}: there are checkpoints, but none can be used: {what}; restore what is missing (is a copy still under way?) or \
         name another checkpoint with checkpoint.resume; to start anew, choose another checkpoint.directory",
        path.display()
    )]
    Unusable { path: PathBuf, what: String },
    /// A file of a checkpoint is missing, damaged or not understood.
    #[error("{}: {what}{others}", path.display())]
    File { path: PathBuf, what: String, others: String },
    /// The slices in a checkpoint do not make up a tensor.
    #[error("{}: tensor `{key}`: {what}", path.display())]
    Cover { path: PathBuf, key: String, what: String },
    /// The checkpoint has no such tensor.
    #[error("{}: there is no tensor `{kind}/{name}`{hint}", path.display())]
    NoTensor { path: PathBuf, kind: Kind, name: String, hint: String },
    /// The checkpoint's tensor has another shape: it is a checkpoint of another model.
    #[error(
        "{}: tensor `{kind}/{name}` has shape {saved:?}, the model needs {wanted:?}: the checkpoint is of another model; \
         give the configuration it was saved with (`state.model` in its manifest.json), or another checkpoint",
        path.display()
    )]
    Shape { path: PathBuf, kind: Kind, name: String, saved: Vec<usize>, wanted: Vec<usize> },
    /// The checkpoint of adapters has another value of something that is frozen under them: versions before moved it.
    #[error(
        "{}: `{name}` is not the base's: an earlier version moved it, but it is frozen under adapters, whose files do not have          it; to begin again from these adapters, export them (export --adapter) and name them with lora.adapter",
        path.display()
    )]
    Frozen { path: PathBuf, name: String },
    /// The checkpoint's tensor has elements that cannot be used.
    #[error("{}: tensor `{kind}/{name}` has elements of type {saved}; only F64, F32, BF16 and F16 can be used here", path.display())]
    Dtype { path: PathBuf, kind: Kind, name: String, saved: Dtype },
}

/// What reads or writes checkpoints.
pub type Result<T, E = CheckpointError> = std::result::Result<T, E>;

impl CheckpointError {
    pub(super) fn io(action: &'static str, path: &Path, cause: io::Error) -> Self {
        Self::Io { action, path: path.to_path_buf(), cause: Arc::new(cause) }
    }

    pub(super) fn file(path: &Path, what: impl Into<String>) -> Self {
        Self::File { path: path.to_path_buf(), what: what.into(), others: String::new() }
    }
}

/// What is tried where a save starts a thread.
pub(super) const START: &str = "start a thread to write";

fn what_to_do(action: &str, cause: &io::Error) -> &'static str {
    match action {
        START => "; allow more threads (`ulimit -u`, the job's limit), or set checkpoint.async = false",
        "read" | "open" | "list" => advice(Access::Read, cause),
        _ => advice(Access::Write, cause),
    }
}
