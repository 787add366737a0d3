//! From a path to a checkpoint's folder and its manifest.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::super::error::{CheckpointError, Result};
use super::super::hashes::hex;
use super::super::manifest::Manifest;
use super::super::names::{self, Folder};
use super::{open_file, size};

/// Bytes of a manifest at most: a hundred times what a model of 8 billion parameters takes on 64 ranks.
const MOST_MANIFEST: u64 = 1 << 30;
/// Bytes of `latest` at most.
const MOST_LATEST: u64 = 1 << 10;
/// Flaws that one message lists.
const LISTED: usize = 5;

/// The folder to open for a path, and what the user should know about the choice.
pub(super) fn find(path: &Path) -> Result<(PathBuf, Option<String>)> {
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
    let problem = match latest(path)? {
        Ok(folder) => return Ok((folder, None)),
        Err(problem) => problem,
    };
    let mut there = list(path)?;
    if let Some((step, newest)) = there.pop_last() {
        let other = begun_again(&there, (step, &newest));
        let warning = format!("{problem}; {} is taken, the newest complete one{other}", newest.display());
        return Ok((newest, Some(warning)));
    }
    let traces = traces(path)?;
    if !traces.is_empty() {
        let flaws = traces.iter().filter(|name| *name != names::LATEST).map(|name| flaw(path, name));
        let mut what: Vec<String> = [problem].into_iter().chain(flaws).collect();
        let more = what.len().saturating_sub(LISTED);
        what.truncate(LISTED);
        what.extend((more > 0).then(|| format!("and {more} more")));
        return Err(CheckpointError::Unusable { path: path.to_path_buf(), what: what.join("; ") });
    }
    let below = path.join("checkpoints");
    let holds = list(&below).is_ok_and(|list| !list.is_empty());
    let guess = if holds { format!("; did you mean {}?", below.display()) } else { String::new() };
    Err(none(&format!("it has no {}, and {problem}{guess}", names::MANIFEST)))
}

/// What to say of those `there` whose run began again before the `newest` one, which is of another.
fn begun_again(there: &BTreeMap<u64, PathBuf>, (step, newest): (u64, &Path)) -> String {
    let began = |folder: &Path| begun_from(folder).ok().flatten().filter(|begun| *begun < step);
    let own = began(newest);
    for (_, folder) in there.iter().rev().filter(|(other, _)| own.is_none_or(|own| **other > own)) {
        if let Some(begun) = began(folder).filter(|begun| own != Some(*begun)) {
            let folder = folder.display();
            return format!("; {folder} is of a run that began again from step {begun}: name it to continue that one");
        }
    }
    String::new()
}

/// The folder that `latest` leads to, or why it leads nowhere.
fn latest(root: &Path) -> Result<Result<PathBuf, String>> {
    let latest = root.join(names::LATEST);
    match fs::exists(&latest) {
        Ok(true) => {}
        Ok(false) => return Ok(Err(format!("there is no {}", latest.display()))),
        Err(cause) => return Err(CheckpointError::io("read", &latest, cause)),
    }
    let text = read(&latest, MOST_LATEST)?;
    let flaw = |what: &str| {
        let example = names::step_name(200);
        Ok(Err(format!("{} {what}: write the name of one there, such as {example}, or remove it", latest.display())))
    };
    let Ok(text) = std::str::from_utf8(&text) else { return flaw("is not text and does not name a checkpoint") };
    let Some(folder @ Folder::Step(step)) = Folder::parse(text.trim_end()) else {
        return flaw("does not name a checkpoint");
    };
    // The other name: the step was being saved again when the run was stopped.
    let candidates = [folder, Folder::Replaced(step)].map(|folder| folder.path(root));
    let there = candidates.into_iter().find(|folder| fs::exists(folder).unwrap_or(false));
    Ok(there.ok_or_else(|| format!("{} names {}, which is not there", latest.display(), folder.name())))
}

/// Names in a folder that only a run that has saved there leaves, `latest` first.
pub(super) fn traces(root: &Path) -> Result<Vec<String>> {
    let fail = |cause| CheckpointError::io("list", root, cause);
    let (mut found, mut latest) = (Vec::new(), false);
    for entry in fs::read_dir(root).map_err(fail)? {
        let Ok(name) = entry.map_err(fail)?.file_name().into_string() else { continue };
        match Folder::parse(&name) {
            Some(Folder::Step(_) | Folder::Replaced(_)) => found.push(name),
            _ => latest |= name == names::LATEST,
        }
    }
    found.sort();
    Ok(latest.then(|| names::LATEST.to_string()).into_iter().chain(found).collect())
}

/// What is wrong with the checkpoint `name` in `root`, as far as names and sizes of files tell.
fn flaw(root: &Path, name: &str) -> String {
    let folder = root.join(name);
    let files = |manifest: Manifest| manifest.files.into_iter().chain(manifest.tokenizer).collect::<Vec<_>>();
    match manifest(&folder).map(files) {
        Err(error) => error.to_string(),
        Ok(files) => {
            let flaws: Vec<_> = files.iter().filter_map(|file| open_file(&folder, file).err()).collect();
            match &flaws[..] {
                [] => format!("{} is complete, but has another name", folder.display()),
                [only] => only.to_string(),
                [first, others @ ..] => format!("{first} (and {} more)", others.len()),
            }
        }
    }
}

/// The complete checkpoints in a folder.
pub(super) fn list(root: &Path) -> Result<BTreeMap<u64, PathBuf>> {
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

/// The contents of a file that is not larger than what a run writes there.
fn read(path: &Path, most: u64) -> Result<Vec<u8>> {
    let found = size(path)?;
    if found > most {
        let what = format!("has {found} bytes, it can have {most} at most; it is damaged, restore it");
        return Err(CheckpointError::file(path, what));
    }
    fs::read(path).map_err(|cause| CheckpointError::io("read", path, cause))
}

/// The manifest of a checkpoint, if it is the one that was written.
pub(super) fn manifest(folder: &Path) -> Result<Manifest> {
    let path = folder.join(names::MANIFEST);
    let json = read(&path, MOST_MANIFEST)?;
    // First what it says: a manifest of a newer program may be hashed in another way.
    let manifest = Manifest::from_json(&path, &json)?;
    let sums = read(&folder.join(names::SUMS), MOST_MANIFEST)?;
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
    let step = match checkpoint.file_name().and_then(|name| Folder::parse(name.to_str()?)) {
        Some(Folder::Step(step) | Folder::Replaced(step)) => step,
        _ => u64::MAX,
    };
    let own = begun_from(checkpoint).ok();
    // Without a manifest only that it comes before.
    let is_own = |(other, folder): &(&u64, &PathBuf)| match own {
        Some(begun) => begun.is_some_and(|begun| **other <= begun) || begun_from(folder).ok() == own,
        None => **other < step,
    };
    let others = match (others.iter().rfind(is_own), others.last_key_value()) {
        (Some((_, newest)), _) => format!(", or resume from {}, which is complete", newest.display()),
        (None, Some((_, newest))) => {
            format!(", or resume from {}, which is complete, but may be of another run", newest.display())
        }
        (None, None) => String::new(),
    };
    CheckpointError::File { path, what, others }
}

/// Where the run that saved a checkpoint was told to begin, in the same folder.
fn begun_from(folder: &Path) -> Result<Option<u64>> {
    manifest(folder).map(|manifest| manifest.state.begun_from)
}
