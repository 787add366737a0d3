//! Everything a run writes down about itself, step by step, for people and programs that look at it later.

use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use super::jsonl::JsonLines;
use super::mlflow::MlflowRun;
use super::run_info::RunInfo;
use super::sink::{LogEntry, MetricsSink};
use super::stats::{EvalStats, LoadStats, SaveStats, StepStats};
use super::tensorboard::EventFile;
use super::wandb::WandbRun;
use crate::eval::TaskResult;
use crate::preference::PreferenceMeans;

/// Where a run writes its numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogFiles {
    /// File with a JSON object per step.
    pub jsonl: PathBuf,
    /// Folder of TensorBoard's event files.
    pub tensorboard: Option<PathBuf>,
    /// Folder of Weights & Biases' offline runs.
    pub wandb: Option<PathBuf>,
    /// MLflow's file store.
    pub mlflow: Option<PathBuf>,
    /// What these call the run.
    pub run: RunInfo,
}

impl LogFiles {
    /// `steps.jsonl` in the folder of a run, and nothing else.
    pub fn within(folder: &Path) -> Self {
        Self { jsonl: folder.join("steps.jsonl"), ..Self::default() }
    }
}

/// The log of a run. Every entry is a line like `{"kind":"train","step":3,…}` and, with the same names, a set of
/// scalars `train/…` in TensorBoard; the other kinds are `valid`, `tasks`, `checkpoint` and `resumed`.
///
/// Entries are written at once: what has happened can be read, and a run that is killed leaves only whole entries.
pub struct RunLog {
    sinks: Vec<Box<dyn MetricsSink>>,
    wandb: Option<WandbRun>,
}

#[derive(Serialize)]
struct Entry<T> {
    kind: &'static str,
    #[serde(flatten)]
    stats: T,
}

#[derive(Serialize)]
struct Valid {
    step: u64,
    loss: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    perplexity: Option<f64>,
    tokens: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_accuracy: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    teacher_kl: Option<f64>,
    #[serde(flatten)]
    preference: Option<PreferenceMeans>,
}

impl RunLog {
    /// Opens the files for a run whose last finished step is `step`. What they say of later steps, which the run does
    /// again, is taken back. The error has the path and the cause when a folder or file cannot be made.
    pub fn open(files: &LogFiles, step: u64) -> io::Result<Self> {
        let wandb = files.wandb.as_deref().map(|folder| WandbRun::create(folder, &files.run)).transpose()?;
        Ok(Self { sinks: open(files, step, step > 0)?, wandb })
    }

    /// The same for a run that begins again in its process. What has been written of a run of W&B cannot be taken back:
    /// it continues with the first step that it does not have. Fails as [`open`](Self::open).
    pub fn again(self, files: &LogFiles, step: u64) -> io::Result<Self> {
        drop(self.sinks);
        Ok(Self { sinks: open(files, step, true)?, wandb: self.wandb.map(WandbRun::again) })
    }

    /// Whether the log has this training step and no evaluation after it: its run has ended in between. Fails if it cannot be
    /// read.
    pub(crate) fn lacks_evaluation(files: &LogFiles, step: u64) -> io::Result<bool> {
        let kinds = JsonLines::kinds(&files.jsonl, step)?;
        let has = |kind: &str| kinds.contains(kind);
        Ok(has("train") && !has("valid") && !has("tasks"))
    }

    /// Says that the run has done what it was to do, or was asked to stop. Fails when the disk refuses.
    pub fn end(&mut self) -> io::Result<()> {
        self.all().try_for_each(|sink| sink.end())
    }

    fn all(&mut self) -> impl Iterator<Item = &mut dyn MetricsSink> {
        let wandb = self.wandb.iter_mut().map(|run| run as &mut dyn MetricsSink);
        self.sinks.iter_mut().map(|sink| &mut **sink as &mut dyn MetricsSink).chain(wandb)
    }

    /// Writes to this sink too.
    pub fn with(mut self, sink: impl MetricsSink + 'static) -> Self {
        self.sinks.push(Box::new(sink));
        self
    }

    /// Writes a training step. Fails when the disk refuses.
    pub fn train(&mut self, stats: &StepStats) -> io::Result<()> {
        self.entry("train", stats.step, stats.line())
    }

    /// Writes the validation result after `step`. Fails when the disk refuses.
    pub fn valid(&mut self, step: u64, stats: &EvalStats) -> io::Result<()> {
        let EvalStats { loss, tokens, accuracy: token_accuracy, teacher_kl, preference } = *stats;
        // A loss of pairs is none of tokens.
        let perplexity = preference.is_none().then(|| loss.exp());
        self.entry("valid", step, Valid { step, loss, perplexity, tokens, token_accuracy, teacher_kl, preference })
    }

    /// Writes the metrics of tasks after `step`, as `TASK/METRIC`. Fails when the disk refuses.
    pub fn tasks(&mut self, step: u64, results: &[TaskResult]) -> io::Result<()> {
        let all = results.iter().flat_map(|result| result.metrics.iter().map(move |metric| (result, metric)));
        let values = all.map(|(result, metric)| (format!("{}/{}", result.name, metric.name), metric.value.into()));
        let entry: serde_json::Map<String, Value> =
            [("step".to_string(), step.into())].into_iter().chain(values).collect();
        self.entry("tasks", step, entry)
    }

    /// Writes that a checkpoint is complete. Fails when the disk refuses.
    pub fn saved(&mut self, stats: &SaveStats) -> io::Result<()> {
        self.entry("checkpoint", stats.step, stats)
    }

    /// Writes that the run resumes from a checkpoint. Fails when the disk refuses.
    pub fn resumed(&mut self, stats: &LoadStats) -> io::Result<()> {
        self.entry("resumed", stats.step, stats)
    }

    /// Writes an entry of any kind, whose `stats` have the step. Fails when the disk refuses.
    pub(crate) fn entry(&mut self, kind: &'static str, step: u64, stats: impl Serialize) -> io::Result<()> {
        let entry = Entry { kind, stats };
        let (value, line) = (serde_json::to_value(&entry)?, serde_json::to_string(&entry)?);
        let entry = LogEntry { kind, step, value: &value, line: &line };
        self.all().try_for_each(|sink| sink.entry(&entry))
    }
}

/// The files from which later steps are taken back; `continues`: of a run that they have already.
fn open(files: &LogFiles, step: u64, continues: bool) -> io::Result<Vec<Box<dyn MetricsSink>>> {
    let board = files.tensorboard.as_deref().map(|folder| EventFile::create(folder, step)).transpose()?;
    let mut sinks: Vec<Box<dyn MetricsSink>> = vec![Box::new(JsonLines::open(&files.jsonl, step)?)];
    sinks.extend(board.map(|board| Box::new(board) as _));
    if let Some(store) = &files.mlflow {
        sinks.push(Box::new(MlflowRun::open(store, &files.run, &files.jsonl, continues.then_some(step))?));
    }
    Ok(sinks)
}

impl MetricsSink for JsonLines {
    fn entry(&mut self, entry: &LogEntry) -> io::Result<()> {
        self.line(entry.line)
    }
}

impl MetricsSink for EventFile {
    fn entry(&mut self, entry: &LogEntry) -> io::Result<()> {
        self.scalars(entry.step, &entry.scalars())
    }
}

#[cfg(test)]
mod tests;
