//! Copies to the storage, and checkpoints that are not wanted any more.

use super::super::commit;
use super::super::error::Result;
use super::super::storage::{Copier, CopyReport};
use super::Saver;
use super::run::Progress;

impl Saver {
    /// How copies to the storage that have ended since the last call went, in order.
    pub fn copied(&self) -> Vec<Result<CopyReport>> {
        self.shared.copier.as_ref().map_or(Vec::new(), Copier::finished)
    }

    /// Waits for the copies that are under way, and deletes what was kept for them; [`copied`](Self::copied) returns how they
    /// went.
    ///
    /// # Errors
    /// If it cannot be deleted.
    pub fn wait_for_copies(&self) -> Result<()> {
        let Some(copier) = &self.shared.copier else { return Ok(()) };
        copier.settle();
        let mut progress = self.shared.progress.lock();
        if progress.retired.is_empty() { Ok(()) } else { self.delete_between_saves(&mut progress) }
    }

    /// Gives up the copies that have not begun; [`copied`](Self::copied) says so.
    #[doc(hidden)]
    pub fn skip_copies(&self) {
        self.shared.copier.iter().for_each(Copier::skip);
    }

    /// Says that the checkpoint of a step is not wanted any more, here and in the storage. It is deleted at once, or after the
    /// save or the copy in progress, or, if `latest` names it, after the one that takes its place. Saving the step again
    /// takes this back.
    ///
    /// # Errors
    /// If it cannot be deleted now.
    pub fn retire(&self, step: u64) -> Result<()> {
        self.shared.copier.iter().for_each(|copier| copier.retire(step));
        let mut progress = self.shared.progress.lock();
        progress.retired.insert(step);
        self.delete_between_saves(&mut progress)
    }

    /// Deletes what is not wanted, unless a save is in progress, which will. None starts while `progress` is held.
    fn delete_between_saves(&self, progress: &mut Progress) -> Result<()> {
        let latest = match progress.current {
            None => commit::latest(&self.shared.files, self.root())?,
            Some(_) => None,
        };
        match latest {
            Some(latest) => self.shared.delete_unwanted(&mut progress.retired, latest).map(drop),
            None => Ok(()),
        }
    }
}
