//! The thread that copies a run's checkpoints to a storage.

use std::collections::BTreeSet;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::super::disk::{Files, RealDisk};
use super::super::error::{CheckpointError, Result, START};
use super::super::names;
use super::super::retention::Lineage;
use super::{SharedStorage, Storage, claim, copy};

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
/// behind; those of steps that are kept anyway are not. What is retired is deleted after the next copy, or when none waits.
pub(in super::super) struct Copier {
    work: Arc<Work>,
    thread: Option<JoinHandle<()>>,
}

struct Work {
    storage: Arc<dyn Storage>,
    root: PathBuf,
    keep_last: Option<usize>,
    keep_every: Option<u64>,
    /// The storage is known to be the run's.
    claimed: AtomicBool,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: BTreeSet<u64>,
    /// What is under way.
    current: Option<Job>,
    retired: BTreeSet<u64>,
    /// Of the copies.
    lineage: Lineage,
    /// Whether a step was retired since they were last deleted.
    deletes: bool,
    ended: Vec<Result<CopyReport>>,
    closed: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Job {
    /// Of this step; what is not wanted after it is deleted.
    Copy(u64),
    Delete,
}

impl Copier {
    /// For the checkpoints in `root`. A storage that is not `claimed` yet is before the first copy.
    pub fn start(
        SharedStorage(storage): SharedStorage,
        root: PathBuf,
        keep_last: Option<usize>,
        keep_every: Option<u64>,
        claimed: bool,
    ) -> Result<Self> {
        let (claimed, queue, changed) = (AtomicBool::new(claimed), Mutex::default(), Condvar::new());
        let work = Arc::new(Work { storage, root, keep_last, keep_every, claimed, queue, changed });
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
        queue.retired.remove(&step);
        self.work.changed.notify_all();
    }

    /// The copy of this step is not wanted any more.
    pub fn retire(&self, step: u64) {
        let mut queue = self.work.queue.lock();
        queue.deletes |= queue.retired.insert(step);
        self.work.changed.notify_all();
    }

    /// As [`Saver::begin_from`](crate::checkpoint::Saver::begin_from).
    pub fn begin_from(&self, step: u64) {
        self.work.queue.lock().lineage = Lineage::from(step);
    }

    /// As [`Saver::go_back_to`](crate::checkpoint::Saver::go_back_to).
    pub fn go_back_to(&self, step: u64) {
        self.work.queue.lock().lineage.go_back_to(step);
    }

    /// Gives up those that wait, which [`finished`](Self::finished) says.
    pub fn skip(&self) {
        let queue = &mut *self.work.queue.lock();
        let skipped = std::mem::take(&mut queue.waiting).into_iter();
        queue.ended.extend(skipped.map(|step| Err(self.work.failure(Job::Copy(step), "the run begins again first"))));
    }

    /// Whether the checkpoint of this step must stay until it is copied.
    pub fn needs(&self, step: u64) -> bool {
        let queue = self.work.queue.lock();
        queue.waiting.contains(&step) || queue.current == Some(Job::Copy(step))
    }

    /// How copies that have ended since the last call went, in order.
    pub fn finished(&self) -> Vec<Result<CopyReport>> {
        std::mem::take(&mut self.work.queue.lock().ended)
    }

    /// Waits for those that wait or are under way, and until what is retired is deleted.
    pub fn settle(&self) {
        let mut queue = self.work.queue.lock();
        while !queue.waiting.is_empty() || queue.deletes || queue.current.is_some() {
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
        while let Some(job) = self.next() {
            // A thread that ends here would be waited for without end.
            let done = catch_unwind(AssertUnwindSafe(|| self.work(job)))
                .unwrap_or_else(|_| Err(self.failure(job, "the storage panicked; its message is above")));
            let mut queue = self.queue.lock();
            queue.current = None;
            queue.ended.extend(done.transpose());
            self.changed.notify_all();
        }
    }

    /// Waits for the next one, the oldest first; `None` after the last one.
    fn next(&self) -> Option<Job> {
        let mut queue = self.queue.lock();
        loop {
            queue.current = match queue.waiting.pop_first() {
                Some(step) => Some(Job::Copy(step)),
                None => std::mem::take(&mut queue.deletes).then_some(Job::Delete),
            };
            if queue.current.is_some() || queue.closed {
                return queue.current;
            }
            self.changed.wait(&mut queue);
        }
    }

    fn failure(&self, job: Job, why: &'static str) -> CheckpointError {
        let (action, what) = match job {
            Job::Copy(step) => ("write", names::step_name(step)),
            Job::Delete => ("delete", "old checkpoints".into()),
        };
        let (what, cause) = (format!("{what} in {}", self.storage.name()), Arc::new(io::Error::other(why)));
        CheckpointError::Storage { action, what, cause }
    }

    fn work(&self, job: Job) -> Result<Option<CopyReport>> {
        let (storage, start) = (&*self.storage, Instant::now());
        if !self.claimed.load(Ordering::Relaxed) {
            claim(storage, &Files::new(RealDisk), &self.root)?;
            self.claimed.store(true, Ordering::Relaxed);
        }
        match job {
            Job::Copy(step) => {
                let bytes = copy::upload(&self.root, step, storage)?;
                self.queue.lock().lineage.add(step);
                let deleted = self.prune(step)?;
                let seconds = start.elapsed().as_secs_f64();
                Ok(Some(CopyReport { step, storage: storage.name(), bytes, seconds, deleted }))
            }
            Job::Delete => {
                copy::newest(storage)?.map(|latest| self.prune(latest)).transpose()?;
                Ok(None)
            }
        }
    }

    fn prune(&self, latest: u64) -> Result<Vec<u64>> {
        let (retired, lineage) = {
            let queue = self.queue.lock();
            (queue.retired.clone(), queue.lineage.clone())
        };
        copy::prune(&*self.storage, latest, self.keep_last, self.keep_every, &retired, &lineage)
    }
}
