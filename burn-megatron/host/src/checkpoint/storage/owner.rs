//! Which run a storage belongs to.
//!
//! A run's folder has an id that no other has, and `owner` in the storage that of the first run that came, which the storage
//! takes only where there is none. So of two runs that begin at the same time one is refused, and a run that is killed and
//! starts again, on whatever host, is the same run.

use std::collections::hash_map::RandomState;
use std::fs;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::super::disk::Files;
use super::super::error::{CheckpointError, Result};
use super::super::lock::host_name;
use super::super::names::{NEW_OWN, OWN, OWNER};
use super::{Storage, refused};

/// A run, in its own folder and in its storage.
#[derive(Serialize, Deserialize)]
struct Owner {
    /// Random.
    id: String,
    /// The storage that it was made for.
    storage: String,
    /// For people: host and folder where the run began.
    run: String,
}

impl Owner {
    fn new(storage: String, root: &Path) -> Self {
        let random = || RandomState::new().build_hasher().finish();
        let run = format!("{} on {}", root.display(), host_name());
        Self { id: format!("{:016x}{:016x}", random(), random()), storage, run }
    }

    /// None of ours.
    fn unknown() -> Self {
        Self { id: String::new(), storage: String::new(), run: "unknown".into() }
    }
}

/// Makes the storage that of the run in `root`, if it is no other's. Only for who has the lock of `root`.
///
/// # Errors
/// Names the other run, or says what the storage or the disk refuses.
pub(in super::super) fn claim(storage: &dyn Storage, files: &Files, root: &Path) -> Result<()> {
    let mut own = own(files, root)?;
    let owner = match stored(storage)? {
        Some(owner) => Some(owner),
        None => {
            let name = storage.name();
            let at = own.iter().position(|own| own.storage == name).unwrap_or_else(|| {
                own.push(Owner::new(name, root));
                own.len() - 1
            });
            // Here first: a run that is killed in between has no storage yet, and not one that it does not know.
            write(&own, files, root)?;
            let created = tempfile::tempdir().and_then(|folder| {
                // With the usual permissions, as `latest`.
                let file = folder.path().join(OWNER);
                fs::write(&file, serde_json::to_vec(&own[at])?)?;
                storage.create(OWNER, &file)
            });
            match created {
                // Also of a request that was sent twice.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                created => created.map_err(refused(storage, "write", OWNER))?,
            }
            stored(storage)?
        }
    };
    let owner = owner.unwrap_or_else(Owner::unknown);
    match own.iter().any(|own| own.id == owner.id) {
        true => Ok(()),
        false => Err(CheckpointError::Owned { storage: storage.name(), owner: owner.run, file: OWNER }),
    }
}

/// Makes the run in `root`, which has a checkpoint of the storage, one that the storage belongs to. Only for who has the lock
/// of `root`.
///
/// # Errors
/// What the storage or the disk refuses.
pub(super) fn adopt(storage: &dyn Storage, files: &Files, root: &Path) -> Result<()> {
    let mut own = own(files, root)?;
    match stored(storage)? {
        Some(owner) if own.iter().all(|own| own.id != owner.id) => {
            own.push(owner);
            write(&own, files, root)
        }
        _ => Ok(()),
    }
}

/// What the run in `root` is called, in each of its storages: several runs may begin from one checkpoint that they fetched.
/// Nothing in a file that is no such list.
fn own(files: &Files, root: &Path) -> Result<Vec<Owner>> {
    Ok(files.read(&root.join(OWN))?.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default())
}

fn write(own: &[Owner], files: &Files, root: &Path) -> Result<()> {
    let (new, path) = (root.join(NEW_OWN), root.join(OWN));
    let text = serde_json::to_vec(own).map_err(|error| CheckpointError::file(&path, error.to_string()))?;
    files.write_file(&new, &text)?;
    files.rename(&new, &path)?;
    files.sync_folder(root)
}

/// The run that a storage belongs to; a file that is no such text is that of an unknown one.
fn stored(storage: &dyn Storage) -> Result<Option<Owner>> {
    let refused = refused(storage, "read", OWNER);
    let folder = tempfile::tempdir().map_err(&refused)?;
    let file = folder.path().join(OWNER);
    match storage.get(OWNER, &file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        got => {
            let text = got.and_then(|()| fs::read(&file)).map_err(&refused)?;
            Ok(Some(serde_json::from_slice(&text).unwrap_or_else(|_| Owner::unknown())))
        }
    }
}
