//! From a path to a checkpoint's folder and its manifest.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::super::error::CheckpointError;
use super::super::manifest::Manifest;
use super::super::names::{self, Folder};
use super::super::part::hex;
use super::open_file;

/// The folder to open for a path, and what the user should know about the choice.
pub(super) fn find(path: &Path) -> Result<(PathBuf, Option<String>), CheckpointError> {
    let none = |what: &str| CheckpointError::NotFound { path: path.to_path_buf(), what: what.into() };
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(none("there is no such folder")),
        Err(cause) => return Err(CheckpointError::io("open", path, cause)),
        Ok(metadata) if !metadata.is_dir() => return Err(none("it is a file; give the folder of a checkpoint")),
        Ok(_) => {}
    }
    let exists = |folder: &Path| fs::exists(folder).unwrap_or(false);
    if exists(&path.join(names::MANIFEST)) {
        return Ok((path.to_path_buf(), None));
    }
    let latest = path.join(names::LATEST);
    let problem = match fs::read_to_string(&latest) {
        Ok(text) => match Folder::parse(text.trim_end()) {
            Some(folder @ Folder::Step(step)) => {
                if exists(&folder.path(path)) {
                    return Ok((folder.path(path), None));
                }
                // The step was being saved again when the run was stopped.
                let replaced = Folder::Replaced(step).path(path);
                if exists(&replaced) {
                    return Ok((replaced, None));
                }
                format!("{} names {}, which is not there", latest.display(), folder.name())
            }
            _ => format!("{} does not name a checkpoint", latest.display()),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => format!("there is no {}", latest.display()),
        Err(cause) => return Err(CheckpointError::io("read", &latest, cause)),
    };
    match list(path)?.pop_last() {
        Some((_, newest)) => {
            let warning = format!("{problem}; {} is taken, the newest complete one", newest.display());
            Ok((newest, Some(warning)))
        }
        None => {
            let below = path.join("checkpoints");
            let holds = list(&below).is_ok_and(|list| !list.is_empty());
            let guess = if holds { format!("; did you mean {}?", below.display()) } else { String::new() };
            Err(none(&format!("it has no {}, and {problem}{guess}", names::MANIFEST)))
        }
    }
}

/// The complete checkpoints in a folder.
pub(super) fn list(root: &Path) -> Result<BTreeMap<u64, PathBuf>, CheckpointError> {
    let fail = |cause| CheckpointError::io("list", root, cause);
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(root).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        if let Some(Folder::Step(step)) = entry.file_name().to_str().and_then(Folder::parse)
            && is_complete(&entry.path())
        {
            found.insert(step, entry.path());
        }
    }
    Ok(found)
}

fn is_complete(folder: &Path) -> bool {
    let whole = |manifest: Manifest| {
        manifest.files.iter().chain(&manifest.tokenizer).all(|file| open_file(folder, file).is_ok())
    };
    manifest(folder).is_ok_and(whole)
}

/// The manifest of a checkpoint, if it is the one that was written.
pub(super) fn manifest(folder: &Path) -> Result<Manifest, CheckpointError> {
    let read = |name: &str| {
        let path = folder.join(name);
        fs::read(&path).map_err(|cause| match cause.kind() {
            io::ErrorKind::NotFound => CheckpointError::file(&path, "is missing; restore it"),
            _ => CheckpointError::io("read", &path, cause),
        })
    };
    let json = read(names::MANIFEST)?;
    let path = folder.join(names::MANIFEST);
    // First what it says: a manifest of a newer program may be hashed in another way.
    let manifest = Manifest::from_json(&path, &json)?;
    let sums = read(names::SUMS)?;
    let hash = hex(&Sha256::digest(&json));
    if !String::from_utf8_lossy(&sums).lines().any(|line| line == format!("{hash}  {}", names::MANIFEST)) {
        let what = format!("does not have the sha256 that {} gives; one of them is damaged, restore it", names::SUMS);
        return Err(CheckpointError::file(&path, what));
    }
    Ok(manifest)
}

/// Adds to an error about a file which other checkpoints there are in the same folder.
pub(super) fn with_others(error: CheckpointError, checkpoint: &Path) -> CheckpointError {
    let CheckpointError::File { path, what, .. } = error else { return error };
    let mut others = checkpoint.parent().and_then(|root| list(root).ok()).unwrap_or_default();
    others.retain(|_, other| other != checkpoint);
    let others = match others.pop_last() {
        Some((_, newest)) => format!(", or go on from {}, which is complete", newest.display()),
        None => String::new(),
    };
    CheckpointError::File { path, what, others }
}
