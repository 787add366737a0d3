//! Where a run saves, and the checkpoint that it resumes from.

use std::path::{Path, PathBuf};

use backend_dist::mesh::ParallelLayout;
use sha2::{Digest, Sha256};

use crate::checkpoint::{
    Checkpoint, CheckpointError, SaveEvery, SaverOptions, SharedStorage, open_storage, stored_steps,
};
use crate::config::{Problem, RunConfig};
use crate::learner::CheckpointOptions;

/// A checkpoint that a run resumes from.
#[derive(Clone, Debug, PartialEq)]
pub struct ResumePoint {
    /// Its folder.
    pub path: PathBuf,
    /// Steps done.
    pub step: u64,
    /// Layout of the run that saved it.
    pub layout: ParallelLayout,
    /// The step in `checkpoint.directory` that the run was told to begin with, then or before; see
    /// [`RunState::begun_from`](crate::checkpoint::RunState::begun_from).
    pub begun_from: Option<u64>,
    /// What the user should know: it is not the one that `latest` names.
    pub warning: Option<String>,
}

/// The checkpoint that `checkpoint.resume` means, if there is one, and whether the run may resume from it when the keys
/// in `allowed` may have changed.
pub(super) fn find(config: &RunConfig, allowed: &[String]) -> Result<Option<ResumePoint>, Vec<Problem>> {
    let section = &config.checkpoint;
    let one = |what: String| vec![Problem::new(what)];
    if let (Some(url), Some(root)) = (section.storage.as_deref(), section.directory.as_deref())
        && is_folder(url, root)
    {
        let what =
            format!("checkpoint.storage = {url} is checkpoint.directory itself; name another place for the copies");
        return Err(one(what));
    }
    let storage = section.storage.as_deref().map(open_storage).transpose();
    let storage = storage.map_err(|error| one(format!("checkpoint.{error}")))?;
    let checkpoint = match (section.resume.as_str(), &section.directory) {
        ("never", Some(root)) => {
            return starts_anew(root).and_then(|()| only_in_storage(storage, &section.resume, root)).map(|()| None);
        }
        ("never" | "if-present", None) => return Ok(None),
        ("if-present", Some(root)) => match newest(config, root) {
            Err(CheckpointError::NotFound { .. }) => {
                return only_in_storage(storage, &section.resume, root).map(|()| None);
            }
            opened => opened,
        },
        (path, root) => later(root.as_deref(), Path::new(path)),
    };
    let is_word =
        section.resume != "if-present" && !section.resume.contains('/') && !Path::new(&section.resume).is_dir();
    let legal = if is_word { "; legal: if-present, never, or the path of a checkpoint" } else { "" };
    let checkpoint =
        checkpoint.map_err(|error| one(format!("checkpoint.resume = {}: {error}{legal}", section.resume)))?;
    let state = checkpoint.state();
    let (path, step, steps) = (checkpoint.path().to_path_buf(), state.step, config.training.steps);
    let mut problems = config.check_changes(&state.config, allowed).err().map_or(Vec::new(), |errors| errors.0);
    if !problems.is_empty() {
        let what = "is what this run would resume from; for a new run give another output.directory";
        problems.push(Problem::new(format!("{} {what}", path.display())));
    }
    if step > steps as u64 {
        let what = format!("training.steps = {steps}, but {} has done {step} already", path.display());
        problems.push(Problem::new(what));
    }
    let (layout, mut warning) = (state.layout.clone(), checkpoint.warning().map(String::from));
    if section.resume != "if-present" && !is_within(&path, Path::new(&section.resume)) {
        let own = format!("{} is later than checkpoint.resume = {}", path.display(), section.resume);
        warning = Some(warning.map_or(own.clone(), |warning| format!("{own}; {warning}")));
    }
    let is_copy = local_root(config).is_some_and(|local| is_within(&path, &local));
    let is_own = is_copy || section.directory.as_deref().is_some_and(|root| is_within(&path, root));
    let is_named = resolved(&path) == resolved(Path::new(&section.resume));
    let begun_from = if is_named { Some(step) } else { state.begun_from }.filter(|_| is_own);
    if problems.is_empty() { Ok(Some(ResumePoint { path, step, layout, begun_from, warning })) } else { Err(problems) }
}

/// The newest checkpoint of the run, or its copy in the host's memory where that is newer. Without its own folder a run has
/// been thrown away, and a copy that cannot be read is none.
fn newest(config: &RunConfig, root: &Path) -> Result<Checkpoint, CheckpointError> {
    let on_disk = Checkpoint::open(root);
    let copy = local_root(config).filter(|_| root.is_dir()).and_then(|local| Checkpoint::open(local).ok());
    match (copy, &on_disk) {
        (Some(copy), Ok(saved)) if copy.state().step > saved.state().step => Ok(copy),
        (Some(copy), Err(CheckpointError::NotFound { .. })) => Ok(copy),
        _ => on_disk,
    }
}

/// The run's own folder in `checkpoint.non-persistent-local-dir`, which other runs may have too.
fn local_root(config: &RunConfig) -> Option<PathBuf> {
    let section = &config.checkpoint;
    let (local, root) = (section.non_persistent_local_dir.as_ref()?, section.directory.as_deref()?);
    let root = std::path::absolute(root).ok()?;
    let hash = Sha256::digest(root.as_os_str().as_encoded_bytes());
    let name: String = hash[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    Some(local.join(format!("burn-megatron-{name}")))
}

/// Where and when copies are made in the host's memory, with the tokenizer and in the manner of checkpoints.
pub(super) fn local_copies(config: &RunConfig, checkpoints: &CheckpointOptions) -> Option<CheckpointOptions> {
    let every = SaveEvery::Steps(config.checkpoint.non_persistent_every?);
    let saver = SaverOptions { keep_last: Some(1), keep_every: None, storage: None, ..checkpoints.saver.clone() };
    Some(CheckpointOptions { root: local_root(config)?, every, saver })
}

/// Whether a storage is this folder.
fn is_folder(url: &str, root: &Path) -> bool {
    resolved(Path::new(url.strip_prefix("file://").unwrap_or(url))) == resolved(root)
}

/// The path without links, if there is something.
fn resolved(path: &Path) -> Option<PathBuf> {
    path.canonicalize().or_else(|_| std::path::absolute(path)).ok()
}

fn is_within(path: &Path, folder: &Path) -> bool {
    resolved(path).zip(resolved(folder)).is_some_and(|(path, folder)| path.starts_with(folder))
}

/// The checkpoint that a run is told to resume from, or a later one that it has saved since: the same command continues it. In
/// the run's own folder later ones may also be of a run that was given up for this one.
fn later(root: Option<&Path>, path: &Path) -> Result<Checkpoint, CheckpointError> {
    let named = Checkpoint::open(path);
    let Some((root, own)) = root.and_then(|root| Some((root, Checkpoint::open(root).ok()?))) else { return named };
    let state = own.state();
    let began_here = |step: u64| step < state.step && resolved(path) == resolved(&Checkpoint::folder_of(root, step));
    let continues = match &named {
        Ok(named) if !is_within(named.path(), root) => named.state().step < state.step,
        // It may be deleted by now.
        _ => state.begun_from.is_some_and(began_here),
    };
    if continues { Ok(own) } else { named }
}

/// A run whose checkpoints are only in their storage must not begin again without saying so, and one that starts anew must not
/// delete the copies of another.
fn only_in_storage(storage: Option<SharedStorage>, resume: &str, root: &Path) -> Result<(), Vec<Problem>> {
    let Some(SharedStorage(storage)) = storage else { return Ok(()) };
    let url = storage.name();
    let what = match stored_steps(&*storage) {
        Ok(steps) => match steps.last() {
            None => return Ok(()),
            Some(step) => format!(
                "checkpoint.resume = {resume}, and {} holds none, but checkpoint.storage = {url} has step {step}: choose another \
                 storage, or bring it with `burn-megatron fetch {url} --output {}` and resume with if-present",
                root.display(),
                root.display()
            ),
        },
        Err(error) => format!("checkpoint.storage = {url}: {error}"),
    };
    Err(vec![Problem::new(what)])
}

/// A run that starts anew must not write between the checkpoints of another.
fn starts_anew(root: &Path) -> Result<(), Vec<Problem>> {
    if !root.exists() {
        return Ok(());
    }
    let there = Checkpoint::list(root).and_then(|steps| Ok((steps, Checkpoint::traces(root)?)));
    let what = match there {
        Ok((_, traces)) if traces.is_empty() => return Ok(()),
        Ok((steps, traces)) => match steps.last_key_value() {
            None => format!(
                "checkpoint.resume = never, but {} holds {}, checkpoints that are not complete: choose another \
                 checkpoint.directory, or move them away",
                root.display(),
                traces.join(", ")
            ),
            Some((step, _)) => format!(
                "checkpoint.resume = never, but {} holds checkpoints up to step {step}: choose another \
                 checkpoint.directory, move them away, or resume from them with if-present",
                root.display()
            ),
        },
        Err(error) => format!("checkpoint.directory: {error}"),
    };
    Err(vec![Problem::new(what)])
}

/// Where and when the run saves, with its tokenizer in every checkpoint. Fails if `checkpoint.storage` is none.
pub(super) fn options(
    config: &RunConfig,
    tokenizer: Option<PathBuf>,
) -> Result<Option<CheckpointOptions>, CheckpointError> {
    let section = &config.checkpoint;
    let Some(root) = section.directory.clone() else { return Ok(None) };
    let storage = section.storage.as_deref().map(open_storage).transpose()?;
    let (keep_last, keep_every, background) = (section.keep_last, section.keep_every, section.background);
    let saver =
        SaverOptions { keep_last, keep_every, background, pinned_memory: section.pinned_memory, storage, tokenizer };
    Ok(Some(CheckpointOptions { root, every: section.every, saver }))
}

/// Whether the run may read other samples than the run that it resumes from: one of the keys that decide them may
/// change.
pub(super) fn may_read_other_data(allowed: &[String]) -> bool {
    allowed.iter().any(|name| name.starts_with("data") || name == "training" || name == "training.seq-length")
}
