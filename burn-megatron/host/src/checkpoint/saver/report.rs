//! Options of a saver, and its report of one save.

use std::path::PathBuf;

use super::super::error::CheckpointError;
use super::super::storage::SharedStorage;

/// How a run saves.
///
/// ```
/// use host::checkpoint::SaverOptions;
///
/// // The last two checkpoints and every 10,000th stay. Training continues while one is written.
/// let (keep_last, keep_every) = (Some(2), Some(10_000));
/// let options = SaverOptions { keep_last, keep_every, background: true, ..SaverOptions::default() };
/// assert_ne!(options, SaverOptions::default(), "which keeps all and waits for each");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SaverOptions {
    /// Keep this many checkpoints, 1 or more; `None` keeps all.
    pub keep_last: Option<usize>,
    /// In addition to the last ones, keep those of steps that are multiples of this.
    pub keep_every: Option<u64>,
    /// Write on threads of its own while training continues.
    pub background: bool,
    /// On GPUs the state is copied to page-locked host memory while the next step computes, and training waits for the copy
    /// only before it writes to that state. Needs as much host memory as a checkpoint has bytes.
    pub pinned_memory: bool,
    /// Also copy every checkpoint there, after it is complete. `keep_last` and `keep_every` hold for the copies too.
    pub storage: Option<SharedStorage>,
    /// A tokenizer to put into every checkpoint, as a `tokenizer.json`.
    pub tokenizer: Option<PathBuf>,
}

/// A save that has succeeded.
#[derive(Clone, Debug)]
pub struct SaveReport {
    /// The step that was saved.
    pub step: u64,
    /// Folder of the checkpoint.
    pub path: PathBuf,
    /// Bytes of the tensors' files.
    pub bytes: u64,
    /// Seconds from the first writer's start until the checkpoint is the latest one; old ones are deleted after that.
    pub seconds: f64,
    /// Steps whose checkpoints were deleted.
    pub deleted: Vec<u64>,
    /// Why checkpoints that are not wanted any more could not be deleted.
    pub not_deleted: Option<CheckpointError>,
}
