//! Copies of the state in a folder of the host's memory (`/dev/shm`), from which processes continue that their launcher has
//! started again. They are checkpoints like others.

use std::fs;
use std::io;
use std::path::Path;

use backend_dist::process::Processes;

use super::logs::say;
use super::saving::{CheckpointOptions, Newest, Saves};
use crate::checkpoint::Checkpoint;

/// Whether a run begins with one.
pub(super) fn is_copy(from: Option<&Checkpoint>, options: Option<&CheckpointOptions>) -> bool {
    from.zip(options).is_some_and(|(from, options)| from.path().starts_with(&options.root))
}

/// The newest checkpoint on disk of a run that begins with `from`: that, or the one before the copy that it is.
pub(super) fn on_disk(
    from: Option<&Checkpoint>,
    is_copy: bool,
    checkpoints: Option<&CheckpointOptions>,
) -> Option<Newest> {
    let of = |checkpoint: &Checkpoint| (checkpoint.state().step, checkpoint.path().to_path_buf());
    match checkpoints.filter(|_| is_copy) {
        Some(options) => Checkpoint::open(&options.root).ok().as_ref().map(of),
        None => from.map(of),
    }
}

/// The newest one, after the one that is being made.
pub(super) fn newest(local: &Saves) -> Option<Checkpoint> {
    local.settled();
    Checkpoint::open(local.root()).ok()
}

/// Deletes them all: those of a run that this one does not continue, or that has ended.
pub(super) fn delete(root: &Path) -> io::Result<()> {
    match fs::remove_dir_all(root) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// After the run, whose last step is on disk.
pub(super) fn end(local: &Saves, processes: &Processes) {
    local.settled();
    if processes.is_first()
        && let Err(error) = delete(local.root())
    {
        say(&format!("{}: copies in the host's memory were not deleted: {error}", local.root().display()));
    }
}
