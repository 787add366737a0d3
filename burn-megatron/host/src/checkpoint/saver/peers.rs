//! Saves by several processes to one folder. Process 0 makes the folder of a save and completes it; the others write
//! their files into it between the two, and learn whether it succeeded.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::super::disk::Files;
use super::super::error::{CheckpointError, Result};
use super::super::manifest::Shard;
use super::super::names::Folder;
use super::SaveReport;

/// How long a folder that another host has made may take to be visible here; NFS caches directories for up to a
/// minute.
const VISIBLE_WITHIN: Duration = Duration::from_secs(90);
/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(50);

/// What the savers of several processes tell each other over.
pub trait Channel: Send + Sync {
    /// Whether this is process 0.
    fn is_first(&self) -> bool;

    /// Every process's text, in the order of the processes.
    ///
    /// # Errors
    /// The first failure of the run.
    fn all_gather(&self, text: String) -> Result<Vec<String>, String>;
}

/// The savers of all processes of a run. They talk over a channel of their own, from the threads that write, so that
/// training continues meanwhile; all of them save the same steps in the same order.
pub struct Peers {
    channel: Box<dyn Channel>,
}

/// What the others need to know of a save that has succeeded.
#[derive(Clone, Serialize, Deserialize)]
struct Completed {
    path: PathBuf,
    bytes: u64,
    seconds: f64,
    deleted: Vec<u64>,
}

impl Peers {
    /// Over a channel that is used for nothing else.
    pub fn new(channel: impl Channel + 'static) -> Self {
        Self { channel: Box::new(channel) }
    }

    pub(super) fn is_first(&self) -> bool {
        self.channel.is_first()
    }

    /// Process 0 prepares the folder of all checkpoints; the others see whether it is theirs too.
    pub(super) fn prepare<T>(
        &self,
        files: &Files,
        root: &Path,
        prepare: impl FnOnce() -> Result<T>,
    ) -> Result<Option<T>> {
        let prepared = self.is_first().then(prepare).transpose();
        self.first(0, prepared.as_ref().map(|_| ()).map_err(Clone::clone))?;
        self.wait_until_visible(files, root)?;
        prepared
    }

    /// Process 0 makes the folder of a save.
    pub(super) fn begin(
        &self,
        files: &Files,
        root: &Path,
        step: u64,
        begin: impl FnOnce() -> Result<PathBuf>,
    ) -> Result<PathBuf> {
        let begun = if self.is_first() { begin().map(drop) } else { Ok(()) };
        self.first(step, begun)?;
        let folder = Folder::Partial(step).path(root);
        self.wait_until_visible(files, &folder)?;
        Ok(folder)
    }

    /// After the last writer of this process: process 0 completes the save if all processes have written their shards.
    pub(super) fn complete(
        &self,
        step: u64,
        shards: Result<Vec<Shard>>,
        complete: impl FnOnce(Result<Vec<Shard>>) -> Result<SaveReport>,
    ) -> Result<SaveReport> {
        let own = shards.as_ref().err().cloned();
        let all = self.gather(step, &shards.map_err(|error| error.to_string()))?;
        let mut shards = Ok(Vec::new());
        for (process, of) in all.into_iter().enumerate() {
            let of = of.map_err(|error| other(step, process, &error));
            shards = shards.and_then(|mut shards: Vec<Shard>| {
                shards.extend(of?);
                Ok(shards)
            });
        }
        // A process names its own trouble as it is, not as the others report it.
        let shards = own.map_or(shards, Err);
        let report = if self.is_first() { Some(complete(shards)) } else { None };
        let told = report.as_ref().map(|report| match report {
            Ok(SaveReport { path, bytes, seconds, deleted, .. }) => {
                Ok(Completed { path: path.clone(), bytes: *bytes, seconds: *seconds, deleted: deleted.clone() })
            }
            Err(error) => Err(error.to_string()),
        });
        let first =
            self.gather(step, &told.into_iter().collect::<Vec<_>>())?.into_iter().next().and_then(|mut of| of.pop());
        match (report, first) {
            (Some(report), _) => report,
            (None, Some(Ok(Completed { path, bytes, seconds, deleted }))) => {
                Ok(SaveReport { step, path, bytes, seconds, deleted, not_deleted: None })
            }
            (None, Some(Err(error))) => Err(other(step, 0, &error)),
            (None, None) => Err(other(step, 0, "it did not say what came of the save")),
        }
    }

    /// All continue if process 0 has succeeded.
    fn first(&self, step: u64, result: Result<()>) -> Result<()> {
        let told = self.gather(step, &result.as_ref().map_err(ToString::to_string).map(|_| ()))?;
        result?;
        told.into_iter().next().unwrap_or(Ok(())).map_err(|error| other(step, 0, &error))
    }

    fn gather<T: Serialize + serde::de::DeserializeOwned>(&self, step: u64, value: &T) -> Result<Vec<T>> {
        let failed = |error: String| CheckpointError::Writers { step, what: format!("the run has failed: {error}") };
        let wrong = |error: serde_json::Error| failed(format!("processes do not understand each other: {error}"));
        let all = self.channel.all_gather(serde_json::to_string(value).map_err(wrong)?).map_err(failed)?;
        all.iter().map(|text| serde_json::from_str(text).map_err(wrong)).collect()
    }

    /// Waits until a folder that process 0 has made is visible here.
    fn wait_until_visible(&self, files: &Files, folder: &Path) -> Result<()> {
        let start = Instant::now();
        loop {
            match files.list(folder) {
                Ok(_) => return Ok(()),
                Err(_) if start.elapsed() < VISIBLE_WITHIN => thread::sleep(PAUSE),
                Err(error) => {
                    let what = format!(
                        "process 0 has made it, but it is not visible here ({error}); checkpoints of several hosts need a folder \
                         that all of them share"
                    );
                    return Err(CheckpointError::file(folder, what));
                }
            }
        }
    }
}

fn other(step: u64, process: usize, error: &str) -> CheckpointError {
    CheckpointError::Writers { step, what: format!("process {process}: {error}") }
}
