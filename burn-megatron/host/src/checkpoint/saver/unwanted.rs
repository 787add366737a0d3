//! Copies to the storage, and checkpoints that are not wanted any more.

use super::super::error::Result;
use super::super::retention::Lineage;
use super::super::storage::{Copier, CopyReport};
use super::super::{Checkpoint, commit, retention};
use super::Saver;
use super::run::Progress;
use std::collections::BTreeMap;
use std::path::PathBuf;

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

    /// Says that the run begins with the state after this step: later checkpoints that are there are of a run that was given
    /// up. They do not count among those that are kept, and each is deleted once this run has saved a later one.
    pub fn begin_from(&self, step: u64) {
        self.shared.copier.iter().for_each(|copier| copier.begin_from(step));
        self.shared.progress.lock().lineage = Lineage::from(step);
    }

    /// The complete checkpoints by step, without those of a run that was given up: see [`begin_from`](Self::begin_from).
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn of_run(&self) -> Result<BTreeMap<u64, PathBuf>> {
        let mut there = Checkpoint::list(self.root())?;
        let progress = self.shared.progress.lock();
        there.retain(|step, _| progress.lineage.has(*step));
        Ok(there)
    }

    /// Makes the checkpoint of a step, which is there, the latest, and [retires](Self::retire) those of the run after it: the
    /// run continues from it and has other steps there. Not while a save is in progress.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn go_back_to(&self, step: u64) -> Result<()> {
        let (files, root) = (&self.shared.files, self.root());
        let mut later = retention::steps(files, root)?;
        {
            let lineage = &mut self.shared.progress.lock().lineage;
            later.retain(|later| *later > step && lineage.has(*later));
            lineage.go_back_to(step);
        }
        if later.is_empty() {
            return Ok(());
        }
        self.shared.copier.iter().for_each(|copier| copier.go_back_to(step));
        commit::point_to(files, root, step)?;
        later.into_iter().try_for_each(|step| self.retire(step))
    }

    /// Deletes what is not wanted, unless a save is in progress, which will. None starts while `progress` is held.
    fn delete_between_saves(&self, progress: &mut Progress) -> Result<()> {
        let latest = match progress.current {
            None => commit::latest(&self.shared.files, self.root())?,
            Some(_) => None,
        };
        match latest {
            Some(latest) => {
                let Progress { retired, lineage, .. } = progress;
                self.shared.delete_unwanted(retired, lineage, latest).map(drop)
            }
            None => Ok(()),
        }
    }
}
