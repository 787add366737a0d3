//! Offline runs of Weights & Biases: folders that `wandb sync FOLDER` uploads.
//!
//! A run that is resumed is a run of its own, in the group of its name: what has been written of a run cannot be taken
//! back, and the steps after the checkpoint are done again. One that begins again in its process continues.

mod record;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::Value;

use super::jsonl::named;
use super::run_info::RunInfo;
use super::sink::{LogEntry, MetricsSink};
use crate::local_time::local_time;
use record::{Log, Record, Start};

/// `wandb/offline-run-TIME-ID/run-ID.wandb` in the folder that a user names.
pub(super) struct WandbRun {
    path: PathBuf,
    file: File,
    log: Log,
    started: Duration,
    /// Values of a step, which W&B wants at once: training and validation of one step are one.
    pending: Option<(u64, Vec<(String, f64)>)>,
    /// The last step that is written.
    written: Option<u64>,
    /// The same when the run began again.
    done: Option<u64>,
}

impl WandbRun {
    /// A new run. The error has the folder and the cause.
    pub fn create(folder: &Path, info: &RunInfo) -> io::Result<Self> {
        let started = now();
        let create = || {
            let mut index = started.as_nanos() as u64 ^ u64::from(std::process::id());
            let (path, file, id) = loop {
                let id = id(index);
                let folder = folder.join("wandb").join(format!("offline-run-{}-{id}", local_time(c"%Y%m%d_%H%M%S")));
                fs::create_dir_all(folder.join("files"))?;
                let path = folder.join(format!("run-{id}.wandb"));
                match OpenOptions::new().create_new(true).append(true).open(&path) {
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => index += 1,
                    file => break (path, file?, id),
                }
            };
            let config: Vec<(String, String)> = info
                .config
                .as_object()
                .into_iter()
                .flatten()
                .map(|(key, value)| (key.clone(), value.to_string()))
                .collect();
            let log = Log::default();
            let mut run = Self { path, file, log, started, pending: None, written: None, done: None };
            run.file.write_all(&record::HEADER)?;
            run.write(&Record::Header)?;
            let start = Start { id: &id, name: &info.name, config: &config, time: started };
            run.write(&Record::Run(start))?;
            Ok(run)
        };
        create().map_err(|error| named(folder, &error))
    }

    fn write(&mut self, record: &Record) -> io::Result<()> {
        let bytes = self.log.frame(record);
        self.file.write_all(&bytes).map_err(|error| named(&self.path, &error))
    }

    /// For steps that are done again: those that are written are left out. The one that is not written yet stays, as it may be
    /// the last that is not done again.
    pub fn again(mut self) -> Self {
        let before = self.pending.as_ref().and_then(|(step, _)| step.checked_sub(1));
        self.done = self.written.max(before);
        self
    }

    /// Writes what has been said of the last step.
    fn flush(&mut self) -> io::Result<()> {
        let Some((step, values)) = self.pending.take() else { return Ok(()) };
        self.written = self.written.max(Some(step));
        let time = now();
        let number = |value: f64| match serde_json::Number::from_f64(value) {
            Some(number) => Value::Number(number).to_string(),
            // As Python's json has it.
            None if value.is_nan() => "NaN".into(),
            None if value > 0.0 => "Infinity".into(),
            None => "-Infinity".into(),
        };
        let mut items: Vec<(String, String)> = values.into_iter().map(|(name, value)| (name, number(value))).collect();
        items.push(("_step".into(), step.to_string()));
        items.push(("_runtime".into(), number((time - self.started).as_secs_f64())));
        items.push(("_timestamp".into(), number(time.as_secs_f64())));
        self.write(&Record::Summary(&items))?;
        self.write(&Record::History { step, items: &items })
    }
}

impl MetricsSink for WandbRun {
    fn entry(&mut self, entry: &LogEntry) -> io::Result<()> {
        if Some(entry.step) <= self.done {
            return Ok(());
        }
        // A checkpoint is complete some steps later. W&B counts on from its last step where a row is of one before, so that all
        // later rows would be those of other steps.
        let step = self.pending.as_ref().map_or(entry.step, |(step, _)| entry.step.max(*step));
        if self.pending.as_ref().is_some_and(|(pending, _)| *pending != step) {
            self.flush()?;
        }
        let values = &mut self.pending.get_or_insert_with(|| (step, Vec::new())).1;
        let news = entry.scalars();
        // A step that is done again has its newest values.
        values.retain(|(name, _)| news.iter().all(|(new, _)| new != name));
        values.extend(news);
        Ok(())
    }

    fn end(&mut self) -> io::Result<()> {
        self.flush()?;
        let runtime = (now() - self.started).as_secs();
        self.write(&Record::Exit { code: 0, runtime })
    }
}

/// The last step of a run that failed is written too.
impl Drop for WandbRun {
    fn drop(&mut self) {
        // The run has an error of its own to end with.
        let _ = self.flush();
    }
}

/// Eight letters and digits, as W&B's own.
fn id(mut number: u64) -> String {
    const LETTERS: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
    let mut letter = || {
        // Two runs that begin after each other shall not look alike (Knuth's multiplier of MMIX).
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        char::from(LETTERS[(number >> 33) as usize % LETTERS.len()])
    };
    (0..8).map(|_| letter()).collect()
}

/// Since 1970.
fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_step_is_written_once_with_its_validation() {
        let folder = tempfile::tempdir().unwrap();
        let info = RunInfo { name: "tiny".into(), config: json!({ "training": { "steps": 2 } }) };
        let mut run = WandbRun::create(folder.path(), &info).unwrap();
        let second = WandbRun::create(folder.path(), &info).unwrap();
        assert_ne!(run.path, second.path);
        let mut log = |kind: &'static str, step: u64, loss: f64| {
            let value = json!({ "kind": kind, "step": step, "loss": loss });
            run.entry(&LogEntry { kind, step, value: &value, line: "" }).unwrap();
        };
        log("train", 1, 2.5);
        log("train", 2, 2.25);
        log("valid", 2, f64::NAN);
        // Complete while the second step was computed.
        log("checkpoint", 1, 3.5);
        run.end().unwrap();
        let bytes = fs::read(&run.path).unwrap();
        assert!(bytes.starts_with(b":W&B"));
        let count = |text: &str| bytes.windows(text.len()).filter(|window| *window == text.as_bytes()).count();
        // Once in the summary, once in the history.
        assert_eq!((count("train/loss"), count("valid/loss"), count("2.25"), count("NaN")), (4, 2, 2, 2));
        assert_eq!(count("{\"steps\":2}"), 1);
        assert_eq!((count("checkpoint/loss"), count("_step")), (2, 4), "no row of step 1 after that of step 2");
    }

    #[test]
    fn the_step_before_a_restart_or_a_failure_is_written_once() {
        let folder = tempfile::tempdir().unwrap();
        let mut run = WandbRun::create(folder.path(), &RunInfo::default()).unwrap();
        let path = run.path.clone();
        let log = |run: &mut WandbRun, kind: &'static str, steps: &[u64]| {
            for &step in steps {
                let value = json!({ "kind": kind, "step": step, "loss": 7000.125 + step as f64 });
                run.entry(&LogEntry { kind, step, value: &value, line: "" }).unwrap();
            }
        };
        log(&mut run, "train", &[1, 2, 3]);
        // Back to step 3, which was not evaluated.
        run = run.again();
        log(&mut run, "valid", &[3]);
        log(&mut run, "train", &[4, 5]);
        // Back to step 1.
        run = run.again();
        log(&mut run, "train", &[2, 3, 4, 5, 6]);
        // The run fails.
        drop(run);
        let bytes = fs::read(path).unwrap();
        let count = |text: &str| bytes.windows(text.len()).filter(|window| *window == text.as_bytes()).count();
        // Once in the summary, once in the history.
        let losses = [1, 2, 3, 4, 5, 6].map(|step| count(&format!("700{step}.125")));
        assert_eq!((losses, count("train/loss"), count("valid/loss")), ([2, 2, 4, 2, 2, 2], 12, 2));
    }
}
