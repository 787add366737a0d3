//! Runs in MLflow's file store (`mlflow/store/tracking/file_store.py`): folders that `mlflow ui --backend-store-uri`
//! shows.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::jsonl::named;
use super::run_info::RunInfo;
use super::sink::{LogEntry, MetricsSink};

/// MLflow's experiment for runs that name none.
const EXPERIMENT: &str = "0";
/// `mlflow.entities.RunStatus`.
const RUNNING: u8 = 1;
const FINISHED: u8 = 3;
const FAILED: u8 = 4;

/// `STORE/0/RUN`.
pub(super) struct MlflowRun {
    folder: PathBuf,
    name: String,
    id: String,
    start: u64,
    ended: bool,
}

impl MlflowRun {
    /// The last run that has logged to `log`, which is resumed after `step`: values of later steps, which it does again, are
    /// taken back. Without a step it is a new one, unless that run has no values. The error has the store and the cause.
    pub fn open(store: &Path, info: &RunInfo, log: &Path, step: Option<u64>) -> io::Result<Self> {
        let open = || {
            let experiment = store.join(EXPERIMENT);
            fs::create_dir_all(&experiment)?;
            let location = fs::canonicalize(&experiment)?;
            if !experiment.join("meta.yaml").exists() {
                let about = [
                    ("artifact_location", json!(location)),
                    ("creation_time", json!(now())),
                    ("experiment_id", json!(EXPERIMENT)),
                    ("last_update_time", json!(now())),
                    ("lifecycle_stage", json!("active")),
                    ("name", json!("Default")),
                ];
                fs::write(experiment.join("meta.yaml"), yaml(&about))?;
            }
            let log = std::path::absolute(log)?;
            let runs = (0..).take_while(|run| location.join(run_id(&log, *run)).exists()).count();
            let has_values = |run: usize| -> io::Result<bool> {
                let metrics = location.join(run_id(&log, run)).join("metrics");
                Ok(metrics.exists() && fs::read_dir(metrics)?.next().is_some())
            };
            let run = match runs.checked_sub(1) {
                None => 0,
                Some(last) if step.is_none() && has_values(last)? => runs,
                Some(last) => last,
            };
            let id = run_id(&log, run);
            let folder = location.join(&id);
            for part in ["artifacts", "metrics", "params", "tags"] {
                fs::create_dir_all(folder.join(part))?;
            }
            if let Some(step) = step {
                undo(&folder.join("metrics"), step)?;
            }
            for (key, value) in info.keys() {
                let text = value.as_str().map_or_else(|| value.to_string(), str::to_string);
                write_value(&folder.join("params"), &key, &text)?;
            }
            write_value(&folder.join("tags"), "mlflow.runName", &info.name)?;
            let run = Self { folder, name: info.name.clone(), id, start: now(), ended: false };
            run.status(RUNNING)?;
            Ok(run)
        };
        open().map_err(|error| named(store, &error))
    }

    fn status(&self, status: u8) -> io::Result<()> {
        let end = if status == RUNNING { Value::Null } else { json!(now()) };
        let about = [
            ("artifact_uri", json!(self.folder.join("artifacts"))),
            ("end_time", end),
            ("entry_point_name", json!("")),
            ("experiment_id", json!(EXPERIMENT)),
            ("lifecycle_stage", json!("active")),
            ("run_id", json!(self.id)),
            ("run_name", json!(self.name)),
            ("run_uuid", json!(self.id)),
            ("source_name", json!("burn-megatron")),
            // LOCAL of `mlflow.entities.SourceType`.
            ("source_type", json!(4)),
            ("source_version", json!("")),
            ("start_time", json!(self.start)),
            ("status", json!(status)),
            ("tags", json!([])),
            ("user_id", json!(std::env::var("USER").unwrap_or_default())),
        ];
        fs::write(self.folder.join("meta.yaml"), yaml(&about))
    }
}

impl MetricsSink for MlflowRun {
    fn entry(&mut self, entry: &LogEntry) -> io::Result<()> {
        let (folder, time, step) = (self.folder.join("metrics"), now(), entry.step);
        let append = |(name, value): (String, f64)| {
            let path = folder.join(metric(&name));
            fs::create_dir_all(path.parent().unwrap_or(&folder))?;
            let mut file = fs::OpenOptions::new().create(true).append(true).open(path)?;
            file.write_all(format!("{time} {value} {step}\n").as_bytes())
        };
        entry.scalars().into_iter().try_for_each(append).map_err(|error| named(&self.folder, &error))
    }

    fn end(&mut self) -> io::Result<()> {
        self.ended = true;
        self.status(FINISHED).map_err(|error| named(&self.folder, &error))
    }
}

impl Drop for MlflowRun {
    fn drop(&mut self) {
        if !self.ended {
            // The run has an error of its own to end with.
            let _ = self.status(FAILED);
        }
    }
}

/// The id of a run that logs to a file, after so many others that have.
fn run_id(log: &Path, former: usize) -> String {
    let mut hash = Sha256::new_with_prefix(log.as_os_str().as_encoded_bytes());
    if former > 0 {
        hash.update(format!("\n{former}"));
    }
    hash.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Drops the values of later steps, in all files below a folder.
fn undo(folder: &Path, step: u64) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            undo(&path, step)?;
            continue;
        }
        let text = fs::read_to_string(&path)?;
        let of =
            |line: &&str| line.rsplit(' ').next().and_then(|last| last.parse().ok()).is_some_and(|at: u64| at <= step);
        let kept: String = text.lines().filter(of).map(|line| format!("{line}\n")).collect();
        if kept.is_empty() {
            // MLflow takes a metric without a value for a broken one.
            fs::remove_file(&path)?;
        } else if kept != text {
            fs::write(&path, kept)?;
        }
    }
    Ok(())
}

fn write_value(folder: &Path, name: &str, value: &str) -> io::Result<()> {
    fs::write(folder.join(legal(name)), value)
}

/// A name of letters, digits and what MLflow allows besides them.
fn legal(name: &str) -> String {
    name.chars().map(|c| if c.is_alphanumeric() || "_-. /".contains(c) { c } else { '_' }).collect()
}

/// The file of a metric below its entry's kind: `train/grad_norm/layers.0` is `train/grad_norm.layers.0`, because a metric
/// cannot be a file and the folder of others.
fn metric(name: &str) -> PathBuf {
    let (kind, name) = name.split_once('/').unwrap_or(("", name));
    Path::new(kind).join(legal(&name.replace('/', ".")))
}

/// Fields of a YAML file; JSON's values are YAML's.
fn yaml(fields: &[(&str, Value)]) -> String {
    fields.iter().map(|(name, value)| format!("{name}: {value}\n")).collect()
}

/// Milliseconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(run: &mut MlflowRun, kind: &'static str, step: u64, loss: f64) {
        let value = json!({ "kind": kind, "step": step, "loss": loss });
        run.entry(&LogEntry { kind, step, value: &value, line: "" }).unwrap();
    }

    fn steps(folder: &Path) -> Vec<u64> {
        let text = fs::read_to_string(folder).unwrap();
        text.lines().map(|line| line.split(' ').nth(2).unwrap().parse().unwrap()).collect()
    }

    #[test]
    fn a_resumed_run_is_the_same_run_without_what_it_does_again() {
        let folder = tempfile::tempdir().unwrap();
        let (store, file) = (folder.path().join("mlruns"), folder.path().join("steps.jsonl"));
        let config = json!({ "training": { "seq-length": 128, "dtype": "bf16" } });
        let info = RunInfo { name: "tiny".into(), config };
        let status = |run: &Path| {
            let text = fs::read_to_string(run.join("meta.yaml")).unwrap();
            text.lines().find_map(|line| line.strip_prefix("status: ").map(str::to_string)).unwrap()
        };
        let mut run = MlflowRun::open(&store, &info, &file, None).unwrap();
        let path = run.folder.clone();
        (1..=4).for_each(|step| log(&mut run, "train", step, 2.5));
        log(&mut run, "valid", 4, f64::NAN);
        assert_eq!(status(&path), "1");
        drop(run);
        assert_eq!(status(&path), "4", "it did not end");
        let line = fs::read_to_string(path.join("metrics/valid/loss")).unwrap();
        assert!(line.ends_with(" NaN 4\n"), "{line}");

        let mut run = MlflowRun::open(&store, &info, &file, Some(2)).unwrap();
        assert_eq!(run.folder, path);
        log(&mut run, "train", 3, 2.0);
        run.end().unwrap();
        assert_eq!(steps(&path.join("metrics/train/loss")), [1, 2, 3]);
        assert!(!path.join("metrics/valid/loss").exists());
        assert_eq!(status(&path), "3");
        let value = json!({ "grad_norm": 1.5, "grad_norm/layers.0": 0.5 });
        let entry = LogEntry { kind: "train", step: 3, value: &value, line: "" };
        MlflowRun::open(&store, &info, &file, Some(2)).unwrap().entry(&entry).unwrap();
        assert!(["grad_norm", "grad_norm.layers.0"].iter().all(|name| path.join("metrics/train").join(name).is_file()));
        let param = |name: &str| fs::read_to_string(path.join("params").join(name)).unwrap();
        assert_eq!((param("training.seq-length"), param("training.dtype")), ("128".into(), "bf16".into()));
        let other = MlflowRun::open(&store, &info, &folder.path().join("other.jsonl"), None).unwrap();
        assert_ne!(other.folder, path);
    }

    #[test]
    fn a_new_run_with_the_log_of_a_former_one_leaves_its_values() {
        let folder = tempfile::tempdir().unwrap();
        let (store, file) = (folder.path().join("mlruns"), folder.path().join("steps.jsonl"));
        let open = |step| MlflowRun::open(&store, &RunInfo::default(), &file, step).unwrap();
        let mut former = open(None);
        (1..=4).for_each(|step| log(&mut former, "train", step, 2.5));
        let path = former.folder.clone();
        former.end().unwrap();
        // One that ends before its first step leaves nothing behind that another would have to keep.
        let new = open(None).folder.clone();
        assert_ne!(new, path);
        let mut run = open(None);
        assert_eq!(run.folder, new);
        (1..=3).for_each(|step| log(&mut run, "train", step, 2.0));
        drop(run);
        log(&mut open(Some(2)), "train", 3, 1.5);
        let steps = |run: &Path| steps(&run.join("metrics/train/loss"));
        assert_eq!((steps(&path), steps(&new)), (vec![1, 2, 3, 4], vec![1, 2, 3]), "the last one is resumed");
        // A restart within the process, from the first step.
        let again = open(Some(0));
        assert!(again.folder == new && !new.join("metrics/train/loss").exists());
    }
}
