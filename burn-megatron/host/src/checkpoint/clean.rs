//! Leftovers of saves that did not end.

use std::path::Path;

use super::disk::Files;
use super::error::Result;
use super::names::{self, Folder};

/// Removes what failed saves and killed runs have left, and gives a replaced checkpoint its name back if the one that
/// was to take it did not come that far. Only for who has the lock of `root`.
pub(super) fn clean_up(files: &Files, root: &Path) -> Result<()> {
    let entries = files.list(root)?;
    let is_there = |folder: Folder| entries.iter().any(|entry| entry.name == folder.name());
    for entry in &entries {
        let path = root.join(&entry.name);
        match Folder::parse(&entry.name) {
            None if entry.name == names::NEW_LATEST => files.remove_file(&path)?,
            None | Some(Folder::Step(_)) => {}
            Some(Folder::Replaced(step)) if !is_there(Folder::Step(step)) => {
                files.rename(&path, &Folder::Step(step).path(root))?;
                files.sync_folder(root)?;
            }
            Some(_) => files.remove_folder(&path)?,
        }
    }
    Ok(())
}
