//! Saves of a run: several writers, one save at a time, in the background if asked for.

mod peers;
mod report;
mod run;
mod unwanted;

use std::cell::Cell;
use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use super::clean::clean_up;
use super::disk::{Files, RealDisk};
use super::error::{CheckpointError, Result};
use super::lock::{Lock, lock};
use super::names;
use super::names::Folder;
use super::storage::{Copier, claim};
use super::{RunState, Slice, rehearsal, retention};
use crate::data::tokenizer_json;
use parking_lot::{Condvar, Mutex};
pub use peers::{Channel, Peers};
pub use report::{SaveReport, SaverOptions};
use run::{Progress, Save};

/// Saves checkpoints of a run to a folder; shared by all ranks of a process. With several processes each has one, and
/// they save to one folder that all of them see ([`Saver::among`]).
///
/// Each of its writers, one per rank, calls [`submit`](Saver::submit) for every step that is saved, and all of them do
/// so before any submits the next one, as ranks that reduce gradients together do by themselves. The last one to be written
/// completes the checkpoint. One save is written at a time. [`finished`](Saver::finished) returns the results.
pub struct Saver {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    spawn: Spawn,
}

/// Starts a thread of a name.
pub(super) type Spawn = fn(String, Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>>;

fn spawn(name: String, work: Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name(name).spawn(work)
}

/// What writing threads need.
struct Shared {
    files: Files,
    root: PathBuf,
    /// Those of this process.
    writers: Range<usize>,
    /// The savers of the other processes, if there are any.
    peers: Option<Peers>,
    /// In process 0, if there is a storage.
    copier: Option<Copier>,
    options: SaverOptions,
    tokenizer: Option<Vec<u8>>,
    progress: Mutex<Progress>,
    /// A shard or a save has ended.
    changed: Condvar,
    _lock: Option<Lock>,
}

impl Saver {
    /// Prepares `root`: creates it if it is missing, takes its lock, and removes what a killed run has left.
    ///
    /// # Errors
    /// If the options make no sense, another run saves to `root` or copies to the storage, or `root` cannot be written to.
    pub fn new(root: &Path, writers: usize, options: SaverOptions) -> Result<Self> {
        Self::on(Files::new(RealDisk), root, writers, options)
    }

    /// The same where `writers` are the ranks of one process among several. All of them call it. Process 0 prepares
    /// `root`, which must be on a file system that all hosts see, and completes the saves.
    ///
    /// # Errors
    /// As [`new`](Self::new); also if another process is not prepared.
    pub fn among(peers: Peers, root: &Path, writers: Range<usize>, options: SaverOptions) -> Result<Self> {
        Self::open(Files::new(RealDisk), root, writers, options, Some(peers))
    }

    pub(super) fn on(files: Files, root: &Path, writers: usize, options: SaverOptions) -> Result<Self> {
        Self::open(files, root, 0..writers, options, None)
    }

    fn open(
        files: Files,
        root: &Path,
        writers: Range<usize>,
        options: SaverOptions,
        peers: Option<Peers>,
    ) -> Result<Self> {
        let zero = |option, what: &str| CheckpointError::Option { option, value: "0".into(), what: what.into() };
        if writers.is_empty() {
            return Err(zero("writers", "nobody would save; nearest legal: 1"));
        }
        if options.keep_last == Some(0) {
            return Err(zero("keep-last", "the checkpoint would be deleted as soon as it is saved; nearest legal: 1"));
        }
        if options.keep_every == Some(0) {
            return Err(zero("keep-every", "is not a number of steps; nearest legal: 1"));
        }
        // Converted here: the file's name and the files next to it say what is put around a text.
        let json =
            |path: &PathBuf| tokenizer_json(path).map_err(|error| CheckpointError::file(path, error.to_string()));
        let tokenizer = options.tokenizer.as_ref().map(json).transpose()?;
        let is_claimed = Cell::new(true);
        let prepare = || {
            files.create_folders(root)?;
            let lock = lock(&files, root, names::LOCK, "checkpoint.directory")?;
            clean_up(&files, root)?;
            let claimed = options.storage.as_ref().map_or(Ok(()), |storage| claim(&*storage.0, &files, root));
            match claimed {
                // It may answer later, and is asked again before the first copy.
                Err(CheckpointError::Storage { .. }) => is_claimed.set(false),
                claimed => claimed?,
            }
            Ok(lock)
        };
        let lock = match &peers {
            Some(peers) => peers.prepare(&files, root, prepare)?,
            None => Some(prepare()?),
        };
        let copier = match &options.storage {
            Some(storage) if peers.as_ref().is_none_or(Peers::is_first) => {
                let (keep_last, keep_every) = (options.keep_last, options.keep_every);
                Some(Copier::start(storage.clone(), root.to_path_buf(), keep_last, keep_every, is_claimed.get())?)
            }
            _ => None,
        };
        let shared = Shared {
            files,
            root: root.to_path_buf(),
            writers,
            peers,
            copier,
            options,
            tokenizer,
            progress: Mutex::default(),
            changed: Condvar::new(),
            _lock: lock,
        };
        Ok(Self { shared: Arc::new(shared), threads: Mutex::default(), spawn })
    }

    /// With another way to start threads, for tests.
    #[cfg(test)]
    pub(super) fn spawning(mut self, spawn: Spawn) -> Self {
        self.spawn = spawn;
        self
    }

    /// Folder of the checkpoints.
    pub fn root(&self) -> &Path {
        &self.shared.root
    }

    /// Tries out a save before the first real one: everything that is done to files then is done to small ones now, and
    /// the free space is compared with what checkpoints of `bytes` bytes each will need: as many as are kept and the
    /// one that is being written, or, if it is known, no more than the run's `saves`. Returns the seconds that a save may take,
    /// by the speed of this one.
    ///
    /// # Errors
    /// What the first save would fail with, and what to change.
    pub fn rehearse(&self, bytes: u64, saves: Option<u64>) -> Result<f64> {
        let Shared { files, root, options, .. } = &*self.shared;
        let steps = retention::steps(files, root)?;
        let kept = options.keep_last.unwrap_or(0);
        // The last ones that are there make room for those to come.
        let replaced = steps.iter().rev().take(kept).map(|&step| files.bytes(&Folder::Step(step).path(root)));
        let replaced = replaced.collect::<Result<Vec<u64>, _>>()?;
        let most = saves.map_or(u64::MAX, |saves| replaced.len() as u64 + saves);
        rehearsal::rehearse(files, root, bytes, most.min(kept as u64 + 1), replaced.iter().sum())
    }

    /// Hands over a writer's slices of a step. In the background mode this waits only for an earlier save that is still
    /// being written; otherwise it returns when the file is written, and for the last writer when the save is complete.
    ///
    /// A save that some writer has not submitted to when another submits the next one has failed.
    ///
    /// # Errors
    /// If a slice cannot be saved as it is, or the writers do not agree; then nothing is written. Without the
    /// background mode also if this writer's shard cannot be written.
    pub fn submit(&self, writer: usize, slices: Vec<Slice>, state: &RunState) -> Result<()> {
        let step = state.step;
        let disagree = |what: String| CheckpointError::Writers { step, what };
        if !self.shared.writers.contains(&writer) {
            return Err(disagree(format!("there is no writer {writer} here, only {:?}", self.shared.writers)));
        }
        let mut keys = HashSet::new();
        for slice in &slices {
            let fail = |what| CheckpointError::Slice { writer, step, key: slice.key(), what };
            if let Some(what) = slice.flaw() {
                return Err(fail(what));
            }
            if !keys.insert(slice.key()) {
                return Err(fail("it is given twice".into()));
            }
        }
        let save = self.join(writer, state)?;
        if !self.shared.options.background {
            return self.shared.write(&save, writer, slices);
        }
        let slices = Arc::new(Mutex::new(Some(slices)));
        let (shared, its_save, its_slices) = (Arc::clone(&self.shared), Arc::clone(&save), Arc::clone(&slices));
        // `finished` returns the result.
        let write = move |shared: &Shared, save: &Save, slices: &Mutex<Option<Vec<Slice>>>| {
            let slices = slices.lock().take();
            slices.into_iter().for_each(|slices| drop(shared.write(save, writer, slices)));
        };
        let in_thread = move || write(&shared, &its_save, &its_slices);
        match (self.spawn)(format!("save {writer}"), Box::new(in_thread)) {
            Ok(thread) => {
                let mut threads = self.threads.lock();
                threads.retain(|thread| !thread.is_finished());
                threads.push(thread);
            }
            // The system has no thread now: training waits for this save.
            Err(_) => write(&self.shared, &save, &slices),
        }
        Ok(())
    }

    /// Enters the save of a step, after an earlier one has ended.
    fn join(&self, writer: usize, state: &RunState) -> Result<Arc<Save>> {
        let place = writer - self.shared.writers.start;
        let mut progress = self.shared.progress.lock();
        loop {
            match &mut progress.current {
                None => progress.current = Some(run::Current::new(self.shared.writers.len(), state)),
                Some(current) if current.save.state.step == state.step && !current.submitted[place] => {
                    if let Some(field) = current.save.state.difference(state) {
                        let what = format!("writer {writer} has another `{field}` than the writer before it");
                        return Err(CheckpointError::Writers { step: state.step, what });
                    }
                    current.submitted[place] = true;
                    return Ok(Arc::clone(&current.save));
                }
                Some(current) if current.is_running() => {
                    self.shared.changed.wait(&mut progress);
                }
                Some(_) => self.shared.give_up(&mut progress),
            }
        }
    }

    /// How saves that have ended since the last call went, in order.
    pub fn finished(&self) -> Vec<Result<SaveReport>> {
        std::mem::take(&mut self.shared.progress.lock().ended)
    }

    /// Waits for the save in progress, if any, and reports as [`finished`](Self::finished) does.
    ///
    /// # Errors
    /// The first failure that has not been reported yet; `finished` returns the results of the others. A save that
    /// some writer never submitted to has failed.
    pub fn wait(&self) -> Result<Vec<SaveReport>> {
        self.settle();
        let ended = &mut self.shared.progress.lock().ended;
        match ended.iter().position(Result::is_err) {
            Some(failed) => Err(ended.remove(failed).expect_err("it is one")),
            None => std::mem::take(ended).into_iter().collect(),
        }
    }

    /// Waits for the save in progress, if any, and says how all went that [`finished`](Self::finished) would.
    pub fn settled(&self) -> Vec<Result<SaveReport>> {
        self.settle();
        self.finished()
    }

    /// Ends the save in progress, one way or the other.
    fn settle(&self) {
        let mut progress = self.shared.progress.lock();
        while progress.current.as_ref().is_some_and(run::Current::is_running) {
            self.shared.changed.wait(&mut progress);
        }
        if progress.current.is_some() {
            self.shared.give_up(&mut progress);
        }
    }
}

impl Drop for Saver {
    /// Waits for writes and copies in progress. A save that lacks a writer is given up.
    fn drop(&mut self) {
        self.settle();
        for thread in self.threads.get_mut().drain(..) {
            // A panic of the thread has been printed by itself.
            let _ = thread.join();
        }
        // What cannot be deleted is deleted by the next run.
        let _ = self.wait_for_copies();
    }
}
