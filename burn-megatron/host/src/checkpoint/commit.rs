//! From a folder of written files to a checkpoint that counts.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::RunState;
use super::clean::clean_up;
use super::disk::Files;
use super::error::{CheckpointError, Result};
use super::hashes::hex;
use super::manifest::Shard;
use super::manifest::{Manifest, SavedFile};
use super::names::{self, Folder};

/// Makes an empty folder for the files of a step, and removes what earlier saves that failed have left.
pub(super) fn begin(files: &Files, root: &Path, step: u64) -> Result<PathBuf> {
    let folder = Folder::Partial(step).path(root);
    files.remove_folder(&folder)?;
    // Other leftovers cost space, but are in nobody's way.
    let _ = clean_up(files, root);
    files.create_folder(&folder)?;
    Ok(folder)
}

/// Completes the files of all writers to a checkpoint, gives it its name and makes it the latest. Until `latest` is
/// renamed, the previous checkpoint is; whatever happens in between, one of the two is whole.
pub(super) fn commit(
    files: &Files,
    root: &Path,
    state: RunState,
    tokenizer: Option<&[u8]>,
    shards: Vec<Shard>,
) -> Result<PathBuf> {
    let step = state.step;
    let (partial, path) = (Folder::Partial(step).path(root), Folder::Step(step).path(root));
    write_index(files, &partial, state, tokenizer, shards)?;

    let replaced = Folder::Replaced(step).path(root);
    if files.list(root)?.iter().any(|entry| entry.name == Folder::Step(step).name()) {
        files.remove_folder(&replaced)?;
        files.rename(&path, &replaced)?;
    }
    files.rename(&partial, &path)?;
    files.sync_folder(root)?;
    point_to(files, root, step)?;
    files.remove_folder(&replaced)?;
    Ok(path)
}

/// Writes what belongs to the checkpoint as a whole: tokenizer, manifest, hashes.
fn write_index(
    files: &Files,
    folder: &Path,
    state: RunState,
    tokenizer: Option<&[u8]>,
    shards: Vec<Shard>,
) -> Result<()> {
    let entry = |name: &str, contents: &[u8]| SavedFile {
        name: name.into(),
        bytes: contents.len() as u64,
        sha256: hex(&Sha256::digest(contents)),
        pieces: Vec::new(),
    };
    let tokenizer = match tokenizer {
        Some(contents) => {
            files.write_file(&folder.join(names::TOKENIZER), contents)?;
            Some(entry(names::TOKENIZER, contents))
        }
        None => None,
    };
    let manifest = Manifest::new(folder, state, tokenizer, shards)?;
    let path = folder.join(names::MANIFEST);
    let json = manifest.to_json().map_err(|error| CheckpointError::file(&path, error.to_string()))?;
    files.write_file(&path, json.as_bytes())?;
    let index = entry(names::MANIFEST, json.as_bytes());
    let hashed = [&index].into_iter().chain(&manifest.tokenizer).chain(&manifest.files);
    let sums: String = hashed.map(|file| format!("{}  {}\n", file.sha256, file.name)).collect();
    files.write_file(&folder.join(names::SUMS), sums.as_bytes())?;
    files.sync_folder(folder)
}

/// Makes the checkpoint of a step the one to resume from.
pub(super) fn point_to(files: &Files, root: &Path, step: u64) -> Result<()> {
    let new = root.join(names::NEW_LATEST);
    files.write_file(&new, format!("{}\n", names::step_name(step)).as_bytes())?;
    files.rename(&new, &root.join(names::LATEST))?;
    files.sync_folder(root)
}

/// The step that `latest` names, if it names one.
pub(super) fn latest(files: &Files, root: &Path) -> Result<Option<u64>> {
    let text = files.read(&root.join(names::LATEST))?;
    Ok(text.and_then(|text| match Folder::parse(String::from_utf8_lossy(&text).trim_end()) {
        Some(Folder::Step(step)) => Some(step),
        _ => None,
    }))
}
