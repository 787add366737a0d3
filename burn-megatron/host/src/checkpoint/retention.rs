//! Which checkpoints are deleted, and how.

use std::collections::BTreeSet;
use std::path::Path;

use super::disk::Files;
use super::error::Result;
use super::names::Folder;

/// The checkpoints that a run's state comes from: those that were there up to where it began, and those that it has saved. Others
/// are of a run that was given up when this one began at an older checkpoint.
#[derive(Clone, Debug)]
pub(super) struct Lineage {
    begin: u64,
    saved: BTreeSet<u64>,
}

impl Lineage {
    /// Of a run that begins with the state after a step.
    pub fn from(begin: u64) -> Self {
        Self { begin, saved: BTreeSet::new() }
    }

    /// The run has saved a step.
    pub fn add(&mut self, step: u64) {
        self.saved.insert(step);
    }

    /// The run continues from the checkpoint of a step.
    pub fn go_back_to(&mut self, step: u64) {
        self.begin = self.begin.min(step);
        self.saved.retain(|saved| *saved <= step);
    }

    pub fn has(&self, step: u64) -> bool {
        step <= self.begin || self.saved.contains(&step)
    }
}

/// Of a run that does not say where it begins: all that are there.
impl Default for Lineage {
    fn default() -> Self {
        Self::from(u64::MAX)
    }
}

/// The steps whose checkpoints are no longer wanted, of those that are there: all but the last `keep_last` of the lineage up to
/// `latest` and the multiples of `keep_every`. Without `keep_last` all are kept. Also those that are `retired`.
///
/// Never `latest` itself, and of what comes after it only what is retired: a run that began at an older checkpoint leaves the
/// later ones alone until it has passed their steps.
pub(super) fn unwanted(
    present: &[u64],
    latest: u64,
    keep_last: Option<usize>,
    keep_every: Option<u64>,
    retired: &BTreeSet<u64>,
    lineage: &Lineage,
) -> Vec<u64> {
    // Before its first save a run has not passed anything.
    let is_own = lineage.has(latest);
    let before = present.iter().copied().filter(|&step| is_own && step < latest);
    let (mut earlier, passed): (Vec<u64>, Vec<u64>) = before.partition(|&step| lineage.has(step));
    earlier.sort_unstable();
    // `latest` is the first of the last.
    earlier.truncate(earlier.len().saturating_sub(keep_last.unwrap_or(usize::MAX).saturating_sub(1)));
    earlier.extend(passed.into_iter().filter(|_| keep_last.is_some()));
    earlier.retain(|step| keep_every.is_none_or(|every| !step.is_multiple_of(every)));
    earlier.extend(present.iter().filter(|&step| *step != latest && retired.contains(step)));
    earlier.sort_unstable();
    earlier.dedup();
    earlier
}

/// The steps that have a complete checkpoint in `root`, in order.
pub(super) fn steps(files: &Files, root: &Path) -> Result<Vec<u64>> {
    let entries = files.list(root)?;
    let folders = entries.iter().filter(|entry| entry.is_folder).filter_map(|entry| Folder::parse(&entry.name));
    let mut steps: Vec<u64> =
        folders.filter_map(|folder| if let Folder::Step(step) = folder { Some(step) } else { None }).collect();
    steps.sort_unstable();
    Ok(steps)
}

/// Deletes checkpoints. Each loses its name before its files, so that none is ever half there.
pub(super) fn delete(files: &Files, root: &Path, steps: &[u64]) -> Result<()> {
    if steps.is_empty() {
        return Ok(());
    }
    for &step in steps {
        files.remove_folder(&Folder::Deleted(step).path(root))?;
        files.rename(&Folder::Step(step).path(root), &Folder::Deleted(step).path(root))?;
    }
    files.sync_folder(root)?;
    steps.iter().try_for_each(|&step| files.remove_folder(&Folder::Deleted(step).path(root)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unwanted(present: &[u64], latest: u64, keep_last: Option<usize>, keep_every: Option<u64>) -> Vec<u64> {
        super::unwanted(present, latest, keep_last, keep_every, &BTreeSet::new(), &Lineage::default())
    }

    #[test]
    fn the_last_and_every_so_many_are_kept() {
        let present = [100, 200, 300, 400, 500];
        assert_eq!(unwanted(&present, 500, Some(2), None), [100, 200, 300]);
        assert_eq!(unwanted(&present, 500, Some(2), Some(200)), [100, 300]);
        assert_eq!(unwanted(&present, 500, Some(1), None), [100, 200, 300, 400]);
        assert_eq!(unwanted(&present, 500, Some(9), None), [0; 0]);
        assert_eq!(unwanted(&present, 500, None, Some(200)), [0; 0]);
    }

    #[test]
    fn the_latest_and_what_comes_after_it_are_never_deleted() {
        let present = [300, 100, 400, 200, 500];
        assert_eq!(unwanted(&present, 300, Some(1), None), [100, 200]);
        assert_eq!(unwanted(&present, 300, Some(2), None), [100]);
        assert_eq!(unwanted(&present, 100, Some(1), None), [0; 0]);
    }
}
