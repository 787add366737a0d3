//! The thread that copies a run's checkpoints to a storage.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::super::error::{CheckpointError, START};
use super::{SharedStorage, Storage, copy};

/// A checkpoint that has been copied to the storage.
#[derive(Clone, Debug, PartialEq)]
pub struct CopyReport {
    /// The step.
    pub step: u64,
    /// The storage.
    pub storage: String,
    /// Bytes of all files.
    pub bytes: u64,
    /// Seconds.
    pub seconds: f64,
    /// Steps whose copies were deleted.
    pub deleted: Vec<u64>,
}

/// Copies checkpoints one after the other. Those that wait are skipped for a newer one, so that a slow network does not fall
/// behind; those of steps that are kept anyway are not.
pub(in super::super) struct Copier {
    work: Arc<Work>,
    thread: Option<JoinHandle<()>>,
}

struct Work {
    storage: Arc<dyn Storage>,
    root: PathBuf,
    keep_last: Option<usize>,
    keep_every: Option<u64>,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: BTreeSet<u64>,
    current: Option<u64>,
    ended: Vec<Result<CopyReport, CheckpointError>>,
    closed: bool,
}

impl Copier {
    /// For the checkpoints in `root`.
    pub fn start(
        SharedStorage(storage): SharedStorage,
        root: PathBuf,
        keep_last: Option<usize>,
        keep_every: Option<u64>,
    ) -> Result<Self, CheckpointError> {
        let (queue, changed) = (Mutex::default(), Condvar::new());
        let work = Arc::new(Work { storage, root, keep_last, keep_every, queue, changed });
        let its_work = Arc::clone(&work);
        let thread = thread::Builder::new().name("copy checkpoints".into()).spawn(move || its_work.run());
        let thread = thread.map_err(|cause| CheckpointError::io(START, &work.root, cause))?;
        Ok(Self { work, thread: Some(thread) })
    }

    /// The checkpoint of this step is complete.
    pub fn add(&self, step: u64) {
        let mut queue = self.work.queue.lock();
        queue.waiting.retain(|step| self.work.keep_every.is_some_and(|every| step.is_multiple_of(every)));
        queue.waiting.insert(step);
        self.work.changed.notify_all();
    }

    /// Whether the checkpoint of this step must stay until it is copied.
    pub fn needs(&self, step: u64) -> bool {
        let queue = self.work.queue.lock();
        queue.waiting.contains(&step) || queue.current == Some(step)
    }

    /// How copies that have ended since the last call went, in order.
    pub fn finished(&self) -> Vec<Result<CopyReport, CheckpointError>> {
        std::mem::take(&mut self.work.queue.lock().ended)
    }

    /// Waits for those that wait or are under way.
    pub fn settle(&self) {
        let mut queue = self.work.queue.lock();
        while !queue.waiting.is_empty() || queue.current.is_some() {
            self.work.changed.wait(&mut queue);
        }
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        self.work.queue.lock().closed = true;
        self.work.changed.notify_all();
        // A panic of the thread has been printed by itself.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Work {
    fn run(&self) {
        while let Some(step) = self.next() {
            let copied = self.copy(step);
            let mut queue = self.queue.lock();
            queue.current = None;
            queue.ended.push(copied);
            self.changed.notify_all();
        }
    }

    /// Waits for the next one, the oldest first; `None` after the last one.
    fn next(&self) -> Option<u64> {
        let mut queue = self.queue.lock();
        loop {
            queue.current = queue.waiting.pop_first();
            if queue.current.is_some() || queue.closed {
                return queue.current;
            }
            self.changed.wait(&mut queue);
        }
    }

    fn copy(&self, step: u64) -> Result<CopyReport, CheckpointError> {
        let (storage, start) = (&*self.storage, Instant::now());
        let bytes = copy::upload(&self.root, step, storage)?;
        let deleted = copy::prune(storage, step, self.keep_last, self.keep_every)?;
        Ok(CopyReport { step, storage: storage.name(), bytes, seconds: start.elapsed().as_secs_f64(), deleted })
    }
}
