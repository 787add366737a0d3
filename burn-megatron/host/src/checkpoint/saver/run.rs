//! One save, from the first writer to its end.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::super::clean::clean_up;
use super::super::error::{CheckpointError, Result};
use super::super::manifest::Shard;
use super::super::retention::Lineage;
use super::super::shard;
use super::super::{RunState, Slice, commit, retention};
use super::{SaveReport, Shared};

/// The save in progress, and those that have ended.
#[derive(Default)]
pub(super) struct Progress {
    pub current: Option<Current>,
    pub ended: Vec<Result<SaveReport>>,
    /// Steps whose checkpoints are to be deleted when possible.
    pub retired: BTreeSet<u64>,
    pub lineage: Lineage,
}

/// What every writer of a save knows.
pub(super) struct Save {
    pub state: RunState,
    started: Instant,
    /// The folder of the files; the first writer creates it.
    folder: OnceLock<Result<PathBuf>>,
}

/// A save in progress.
pub(super) struct Current {
    pub save: Arc<Save>,
    pub submitted: Vec<bool>,
    written: usize,
    shards: Vec<Shard>,
    failure: Option<CheckpointError>,
}

impl Current {
    pub fn new(writers: usize, state: &RunState) -> Self {
        let save = Save { state: state.clone(), started: Instant::now(), folder: OnceLock::new() };
        Self { save: Arc::new(save), submitted: vec![false; writers], written: 0, shards: Vec::new(), failure: None }
    }

    /// Whether it makes progress without anyone submitting to it.
    pub fn is_running(&self) -> bool {
        let submitted = self.submitted.iter().filter(|&&submitted| submitted).count();
        submitted == self.submitted.len() || self.written < submitted
    }
}

impl Shared {
    /// Writes a writer's file; after the last one, completes the save.
    pub fn write(&self, save: &Save, writer: usize, slices: Vec<Slice>) -> Result<()> {
        self.end_shard(save, unpanicked(save, || self.write_shard(save, slices, writer)))
    }

    /// Takes note of what a writer has written, or why not. After the last one, completes the save.
    pub fn end_shard(&self, save: &Save, written: Result<Shard>) -> Result<()> {
        let mut progress = self.progress.lock();
        let current = progress.current.as_mut().expect("a save lasts until all that were submitted are written");
        current.written += 1;
        let result = written.map(|shard| current.shards.push(shard));
        if let Err(error) = &result {
            current.failure.get_or_insert_with(|| error.clone());
        }
        if current.written < self.writers.len() {
            self.changed.notify_all();
            return result;
        }
        let (shards, failure) = (std::mem::take(&mut current.shards), current.failure.take());
        drop(progress);
        let shards = failure.map_or(Ok(shards), Err);
        let complete = |shards: Result<Vec<Shard>>| {
            let shards = shards?;
            unpanicked(save, || self.complete(save, shards))
        };
        let outcome = match &self.peers {
            None => complete(shards),
            Some(peers) => {
                let folder = self.folder(save);
                peers.complete(
                    save.state.step,
                    folder.and_then(|folder| {
                        let shards = shards?;
                        self.files.sync_folder(&folder)?;
                        Ok(shards)
                    }),
                    complete,
                )
            }
        };
        if outcome.is_err() {
            self.discard();
        }
        let result = result.and(outcome.as_ref().map(|_| ()).map_err(Clone::clone));
        let mut progress = self.progress.lock();
        progress.current = None;
        progress.ended.push(outcome);
        self.changed.notify_all();
        result
    }

    fn write_shard(&self, save: &Save, slices: Vec<Slice>, writer: usize) -> Result<Shard> {
        let folder = self.folder(save)?;
        let failed = self.progress.lock().current.as_ref().is_some_and(|current| current.failure.is_some());
        match failed {
            // The save will not be completed.
            true => Ok(Shard { file: None, tensors: Vec::new() }),
            false => shard::write(&self.files, &folder, writer, slices),
        }
    }

    /// The folder of a save, made on first use.
    fn folder(&self, save: &Save) -> Result<PathBuf> {
        let step = save.state.step;
        let begin = || commit::begin(&self.files, &self.root, step);
        let begin = || match &self.peers {
            None => begin(),
            Some(peers) => peers.begin(&self.files, &self.root, step, begin),
        };
        save.folder.get_or_init(begin).clone()
    }

    fn complete(&self, save: &Save, mut shards: Vec<Shard>) -> Result<SaveReport> {
        shards.sort_by(|a, b| a.file.as_ref().map(|file| &file.name).cmp(&b.file.as_ref().map(|file| &file.name)));
        let (step, bytes) = (save.state.step, shards.iter().flat_map(|shard| &shard.file).map(|file| file.bytes).sum());
        let path = commit::commit(&self.files, &self.root, save.state.clone(), self.tokenizer.as_deref(), shards)?;
        let seconds = save.started.elapsed().as_secs_f64();
        self.copier.iter().for_each(|copier| copier.add(step));
        // Not under the lock: deleting takes time, and ranks ask how saves went.
        let (mut retired, lineage) = {
            let mut progress = self.progress.lock();
            progress.lineage.add(step);
            (std::mem::take(&mut progress.retired), progress.lineage.clone())
        };
        retired.remove(&step);
        let deletion = self.delete_unwanted(&mut retired, &lineage, step);
        self.progress.lock().retired.append(&mut retired);
        let (deleted, not_deleted) = match deletion {
            Ok(deleted) => (deleted, None),
            Err(error) => (Vec::new(), Some(error)),
        };
        Ok(SaveReport { step, path, bytes, seconds, deleted, not_deleted })
    }

    /// Deletes what the options and `retired` do not want to keep, and returns the steps.
    pub fn delete_unwanted(&self, retired: &mut BTreeSet<u64>, lineage: &Lineage, latest: u64) -> Result<Vec<u64>> {
        let present = retention::steps(&self.files, &self.root)?;
        let (keep_last, keep_every) = (self.options.keep_last, self.options.keep_every);
        let mut unwanted = retention::unwanted(&present, latest, keep_last, keep_every, retired, lineage);
        // What a copy is made of now is deleted after the next save, or after the last copy.
        let needed = |step: &mut u64| self.copier.as_ref().is_some_and(|copier| copier.needs(*step));
        retired.extend(unwanted.extract_if(.., needed));
        retention::delete(&self.files, &self.root, &unwanted)?;
        retired.retain(|&step| present.contains(&step) && !unwanted.contains(&step));
        Ok(unwanted)
    }

    /// Ends a save that lacks writers.
    pub fn give_up(&self, progress: &mut Progress) {
        let Some(current) = progress.current.take() else { return };
        let step = current.save.state.step;
        let missing: Vec<String> = self
            .writers
            .clone()
            .zip(&current.submitted)
            .filter(|(_, came)| !**came)
            .map(|(i, _)| i.to_string())
            .collect();
        let what = format!("nothing came from writer {} of {}", missing.join(", "), self.writers.len());
        progress.ended.push(Err(current.failure.unwrap_or(CheckpointError::Writers { step, what })));
        self.discard();
    }

    /// Frees the space of a save that has failed. What cannot be removed now is removed by the next save or run.
    fn discard(&self) {
        // The folder is process 0's to clear.
        if self.peers.as_ref().is_some_and(|peers| !peers.is_first()) {
            return;
        }
        let _ = clean_up(&self.files, &self.root);
    }
}

/// A panic as an error: other writers wait for the result of this one.
fn unpanicked<T>(save: &Save, action: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(action)).unwrap_or_else(|_| {
        let what = "a writer panicked; its message is above".into();
        Err(CheckpointError::Writers { step: save.state.step, what })
    })
}
