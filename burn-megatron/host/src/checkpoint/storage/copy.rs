//! Checkpoints to a storage and back.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::super::disk::{Files, RealDisk};
use super::super::error::{CheckpointError, Result};
use super::super::names::{self, Folder, LATEST, SUMS};
use super::super::retention::Lineage;
use super::super::{commit, retention};
use super::{Storage, owner, refused};
use crate::checkpoint::Checkpoint;

/// The step of a key in the folder of a checkpoint, and the name of the file.
fn parse(key: &str) -> Option<(u64, &str)> {
    let (folder, file) = key.split_once('/')?;
    match Folder::parse(folder) {
        Some(Folder::Step(step)) if names::is_file_name(file) => Some((step, file)),
        _ => None,
    }
}

/// The steps of which the storage has a complete checkpoint, in order.
///
/// # Errors
/// If the storage refuses.
pub fn stored_steps(storage: &dyn Storage) -> Result<Vec<u64>> {
    let keys = storage.list("step_").map_err(refused(storage, "list", "step_…"))?;
    let complete = keys.iter().filter_map(|key| parse(key)).filter(|(_, file)| *file == SUMS);
    let mut steps: Vec<u64> = complete.map(|(step, _)| step).collect();
    steps.sort_unstable();
    Ok(steps)
}

/// Copies the checkpoint of a step in the folder `root` to the storage, as its newest one. Returns its bytes.
///
/// # Errors
/// If a file cannot be read or the storage refuses; then the checkpoint is not there, or as it was.
pub fn upload(root: &Path, step: u64, storage: &dyn Storage) -> Result<u64> {
    let folder = Folder::Step(step);
    let (path, mut files) = (folder.path(root), Files::new(RealDisk).list(&folder.path(root))?);
    let key = |file: &str| format!("{}/{file}", folder.name());
    // An older one of this step is no checkpoint while its files are replaced.
    let sums = key(SUMS);
    storage.delete(&sums).map_err(refused(storage, "delete", &sums))?;
    files.sort_by_key(|file| file.name == SUMS);
    let mut bytes = 0;
    for file in files.iter().map(|file| &file.name) {
        let (key, from) = (key(file), path.join(file));
        storage.put(&key, &from).map_err(refused(storage, "write", &key))?;
        bytes += fs::metadata(&from).map_err(|cause| CheckpointError::io("read", &from, cause))?.len();
    }
    let put = tempfile::tempdir().and_then(|folder_of_latest| {
        // With the usual permissions, which a `NamedTempFile` has not: other users fetch it too.
        let latest = folder_of_latest.path().join(LATEST);
        fs::write(&latest, format!("{}\n", folder.name()))?;
        storage.put(LATEST, &latest)
    });
    put.map_err(refused(storage, "write", LATEST))?;
    Ok(bytes)
}

/// Deletes the checkpoints of the storage that are not wanted after that of step `latest`, and of those before it that are
/// `retired`; see [`retention::unwanted`]. Returns their steps. Each loses its mark of completeness first.
pub(super) fn prune(
    storage: &dyn Storage,
    latest: u64,
    keep_last: Option<usize>,
    keep_every: Option<u64>,
    retired: &BTreeSet<u64>,
    lineage: &Lineage,
) -> Result<Vec<u64>> {
    let unwanted = retention::unwanted(&stored_steps(storage)?, latest, keep_last, keep_every, retired, lineage);
    for step in &unwanted {
        let folder = format!("{}/", names::step_name(*step));
        let mut keys = storage.list(&folder).map_err(refused(storage, "list", &folder))?;
        keys.sort_by_key(|key| !key.ends_with(SUMS));
        keys.iter().try_for_each(|key| storage.delete(key).map_err(refused(storage, "delete", key)))?;
    }
    Ok(unwanted)
}

/// The step that `latest` names: not the highest one after a run went back to an older checkpoint.
pub(super) fn newest(storage: &dyn Storage) -> Result<Option<u64>> {
    let refused = refused(storage, "read", LATEST);
    let folder = tempfile::tempdir().map_err(&refused)?;
    match storage.get(LATEST, &folder.path().join(LATEST)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        got => got.map_err(refused).and_then(|()| commit::latest(&Files::new(RealDisk), folder.path())),
    }
}

/// Brings the checkpoint of a step, by default of the newest one, into the folder `root`, where it becomes the latest; a run
/// that continues there may copy to the storage. All its files are compared with their hashes. Returns its folder, which is
/// not copied again if it is there already.
///
/// # Errors
/// If the storage has no such checkpoint or refuses, another run saves to `root`, the disk refuses, or a file is damaged; then
/// the checkpoints in `root` and its latest one are as they were.
pub fn fetch(storage: &dyn Storage, step: Option<u64>, root: &Path) -> Result<PathBuf> {
    let steps = stored_steps(storage)?;
    let none = |what: String| CheckpointError::NotFound { path: storage.name().into(), what };
    let step = match step {
        Some(step) if steps.contains(&step) => step,
        Some(step) => {
            let nearest = steps.iter().min_by_key(|other| other.abs_diff(step));
            let nearest = nearest.map_or("it has none".into(), |nearest| format!("the nearest is {nearest}"));
            return Err(none(format!("none of step {step} is complete; {nearest}")));
        }
        None => {
            let highest = *steps.last().ok_or_else(|| none("no step_…/SHA256SUMS, which is copied last".into()))?;
            newest(storage)?.filter(|step| steps.contains(step)).unwrap_or(highest)
        }
    };
    let files = Files::new(RealDisk);
    files.create_folders(root)?;
    let _lock = super::super::lock::lock(&files, root, names::LOCK, "--output")?;
    let path = Folder::Step(step).path(root);
    if path.exists() {
        Checkpoint::open(&path)?.verify(0, 1)?;
    } else {
        let partial = commit::begin(&files, root, step)?;
        get_files(storage, step, &partial).inspect_err(|_| drop(files.remove_folder(&partial)))?;
        files.sync_folder(&partial)?;
        files.rename(&partial, &path)?;
        files.sync_folder(root)?;
    }
    commit::point_to(&files, root, step)?;
    owner::adopt(storage, &files, root)?;
    Ok(path)
}

/// Copies all files of a checkpoint to an empty folder, and compares them with their hashes.
fn get_files(storage: &dyn Storage, step: u64, to: &Path) -> Result<()> {
    let folder = format!("{}/", names::step_name(step));
    let keys = storage.list(&folder).map_err(refused(storage, "list", &folder))?;
    for (key, (_, file)) in keys.iter().filter_map(|key| Some((key, parse(key)?))) {
        let to = to.join(file);
        storage.get(key, &to).map_err(refused(storage, "read", key))?;
        let synced = fs::File::open(&to).and_then(|file| file.sync_all());
        synced.map_err(|cause| CheckpointError::io("write", &to, cause))?;
    }
    Checkpoint::open(to)?.verify(0, 1).map(drop)
}
