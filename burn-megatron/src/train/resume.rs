//! Where a run saves, and the checkpoint that it goes on from.

use std::path::{Path, PathBuf};

use backend_dist::mesh::ParallelLayout;

use crate::checkpoint::{Checkpoint, CheckpointError, SaverOptions};
use crate::config::{Problem, RunConfig};
use crate::learner::CheckpointOptions;

/// A checkpoint that a run goes on from.
#[derive(Clone, Debug, PartialEq)]
pub struct Start {
    /// Its folder.
    pub path: PathBuf,
    /// Steps done.
    pub step: u64,
    /// Layout of the run that saved it.
    pub layout: ParallelLayout,
}

/// The checkpoint that `checkpoint.resume` means, if there is one, and whether the run may go on from it when the keys
/// in `allowed` may have changed.
pub(super) fn find(config: &RunConfig, allowed: &[String]) -> Result<Option<Start>, Vec<Problem>> {
    let section = &config.checkpoint;
    let one = |what: String| vec![Problem::new(what)];
    let checkpoint = match (section.resume.as_str(), &section.directory) {
        ("never", Some(root)) => return starts_anew(root).map(|()| None),
        ("never" | "if-present", None) => return Ok(None),
        ("if-present", Some(root)) => match Checkpoint::open(root) {
            Err(CheckpointError::NotFound { .. }) => return Ok(None),
            opened => opened,
        },
        (path, _) => Checkpoint::open(path),
    };
    let checkpoint = checkpoint.map_err(|error| one(format!("checkpoint.resume = {}: {error}", section.resume)))?;
    let state = checkpoint.state();
    let (path, step, steps) = (checkpoint.path().to_path_buf(), state.step, config.training.steps);
    let mut problems = config.check_changes(&state.config, allowed).err().map_or(Vec::new(), |errors| errors.0);
    if step > steps as u64 {
        let what = format!("training.steps = {steps}, but {} has done {step} already", path.display());
        problems.push(Problem::new(what));
    }
    if problems.is_empty() { Ok(Some(Start { path, step, layout: state.layout.clone() })) } else { Err(problems) }
}

/// A run that starts anew must not write between the checkpoints of another.
fn starts_anew(root: &Path) -> Result<(), Vec<Problem>> {
    let there = if root.exists() { Checkpoint::list(root) } else { return Ok(()) };
    let what = match there {
        Ok(steps) => match steps.last_key_value() {
            None => return Ok(()),
            Some((step, _)) => format!(
                "checkpoint.resume = never, but {} holds checkpoints up to step {step}: choose another \
                 checkpoint.directory, move them away, or go on from them with if-present",
                root.display()
            ),
        },
        Err(error) => format!("checkpoint.directory: {error}"),
    };
    Err(vec![Problem::new(what)])
}

/// Where and when the run saves, with its tokenizer in every checkpoint.
pub(super) fn options(config: &RunConfig, tokenizer: Option<PathBuf>) -> Option<CheckpointOptions> {
    let section = &config.checkpoint;
    let (keep_last, keep_every, background) = (section.keep_last, section.keep_every, section.background);
    let saver = SaverOptions { keep_last, keep_every, background, tokenizer };
    section.directory.clone().map(|root| CheckpointOptions { root, every: section.every, saver })
}

/// Whether the run may read other samples than the run that it goes on from: one of the keys that decide them may
/// change.
pub(super) fn may_read_other_data(allowed: &[String]) -> bool {
    allowed.iter().any(|name| name.starts_with("data") || name == "training" || name == "training.seq-length")
}
