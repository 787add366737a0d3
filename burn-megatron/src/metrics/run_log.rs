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
#[derive(Clone, Debug, PartialEq, Eq)]
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
        Self {
            jsonl: folder.join("steps.jsonl"),
            tensorboard: None,
            wandb: None,
            mlflow: None,
            run: RunInfo::default(),
        }
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
    #[serde(flatten)]
    preference: Option<PreferenceMeans>,
}

impl RunLog {
    /// Opens the files for a run whose last finished step is `step`. What they say of later steps, which the run does
    /// again, is taken back.
    ///
    /// # Errors
    /// The path and the cause when a folder or file cannot be made.
    pub fn open(files: &LogFiles, step: u64) -> io::Result<Self> {
        let wandb = files.wandb.as_deref().map(|folder| WandbRun::create(folder, &files.run)).transpose()?;
        Ok(Self { sinks: open(files, step)?, wandb })
    }

    /// The same for a run that begins again in its process. What has been written of a run of W&B cannot be taken back: it
    /// continues with the first step that it does not have.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn again(self, files: &LogFiles, step: u64) -> io::Result<Self> {
        drop(self.sinks);
        Ok(Self { sinks: open(files, step)?, wandb: self.wandb.map(WandbRun::again) })
    }

    /// Says that the run has done what it was to do, or was asked to stop.
    ///
    /// # Errors
    /// When the disk refuses.
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

    /// Writes a training step.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn train(&mut self, stats: &StepStats) -> io::Result<()> {
        self.entry("train", stats.step, stats.line())
    }

    /// Writes the validation result after `step`.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn valid(&mut self, step: u64, stats: &EvalStats) -> io::Result<()> {
        let EvalStats { loss, tokens, accuracy, preference } = *stats;
        // A loss of pairs is none of tokens.
        let perplexity = preference.is_none().then(|| loss.exp());
        self.entry("valid", step, Valid { step, loss, perplexity, tokens, token_accuracy: accuracy, preference })
    }

    /// Writes the metrics of tasks after `step`, as `TASK/METRIC`.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn tasks(&mut self, step: u64, results: &[TaskResult]) -> io::Result<()> {
        let all = results.iter().flat_map(|result| result.metrics.iter().map(move |metric| (result, metric)));
        let values = all.map(|(result, metric)| (format!("{}/{}", result.name, metric.name), metric.value.into()));
        let entry: serde_json::Map<String, Value> =
            [("step".to_string(), step.into())].into_iter().chain(values).collect();
        self.entry("tasks", step, entry)
    }

    /// Writes that a checkpoint is complete.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn saved(&mut self, stats: &SaveStats) -> io::Result<()> {
        self.entry("checkpoint", stats.step, stats)
    }

    /// Writes that the run resumes from a checkpoint.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn resumed(&mut self, stats: &LoadStats) -> io::Result<()> {
        self.entry("resumed", stats.step, stats)
    }

    fn entry(&mut self, kind: &'static str, step: u64, stats: impl Serialize) -> io::Result<()> {
        let entry = Entry { kind, stats };
        let (value, line) = (serde_json::to_value(&entry)?, serde_json::to_string(&entry)?);
        let entry = LogEntry { kind, step, value: &value, line: &line };
        self.all().try_for_each(|sink| sink.entry(&entry))
    }
}

/// The files from which later steps are taken back.
fn open(files: &LogFiles, step: u64) -> io::Result<Vec<Box<dyn MetricsSink>>> {
    let board = files.tensorboard.as_deref().map(|folder| EventFile::create(folder, step)).transpose()?;
    let mut sinks: Vec<Box<dyn MetricsSink>> = vec![Box::new(JsonLines::open(&files.jsonl, step)?)];
    sinks.extend(board.map(|board| Box::new(board) as _));
    if let Some(store) = &files.mlflow {
        sinks.push(Box::new(MlflowRun::open(store, &files.run, &files.jsonl, step)?));
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
mod tests {
    use std::fs;
    use std::sync::{Arc, Mutex};

    use models::layers::moe::stats::Auxiliary;

    use super::*;
    use crate::engine::ExpertLoad;
    use crate::metrics::{FlopsPerToken, RankReading};

    fn step(step: u64) -> StepStats {
        StepStats {
            loss: 2.5,
            tokens: 128,
            grad_norm: 0.5,
            lr: 1e-3,
            seconds: 0.25,
            memory: 1024,
            ranks: 4,
            step,
            ..StepStats::default()
        }
    }

    struct Memory(Arc<Mutex<Vec<String>>>);

    impl MetricsSink for Memory {
        fn entry(&mut self, entry: &LogEntry) -> io::Result<()> {
            self.0.lock().unwrap().push(entry.line.to_string());
            Ok(())
        }
    }

    /// Those of a training step.
    fn scalars(line: &Value) -> Vec<(String, f64)> {
        LogEntry { kind: "train", step: 0, value: line, line: "" }.scalars()
    }

    #[test]
    fn lines_hold_every_metric_and_tensorboard_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let files =
            LogFiles { tensorboard: Some(folder.path().join("board")), ..LogFiles::within(&folder.path().join("run")) };
        let entries = Arc::new(Mutex::new(Vec::new()));
        let mut log = RunLog::open(&files, 2).unwrap().with(Memory(entries.clone()));
        let saved = SaveStats { step: 2, bytes: 1000, stall: 0.5, seconds: 2.0, share: 0.01 };
        log.resumed(&LoadStats { step: 2, bytes: 1000, seconds: 1.0 }).unwrap();
        let flops = FlopsPerToken { causal: 2e9, full: 3e9, peak: Some(1e12) };
        let stats = StepStats { flops: Some(flops), loss_scale: Some(1024.0), bubble: Some(0.25), ..step(3) };
        log.train(&stats).unwrap();
        let gpu = |idle| RankReading { idle: Some(idle), memory: Some(3 << 30), ..RankReading::default() };
        log.train(&StepStats { gpus: vec![gpu(0.25), gpu(0.75)], ..step(4) }).unwrap();
        log.valid(4, &EvalStats { loss: 2.0, tokens: 64, accuracy: None, preference: None }).unwrap();
        log.saved(&saved).unwrap();
        let text = fs::read_to_string(folder.path().join("run/steps.jsonl")).unwrap();
        assert_eq!(entries.lock().unwrap().join("\n") + "\n", text, "another sink gets the same entries");
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let expected = serde_json::json!({
            "kind": "train", "step": 3, "loss": 2.5, "tokens": 128, "grad_norm": 0.5, "lr": 1e-3, "seconds": 0.25,
            "tokens_per_second": 512.0, "tokens_per_second_per_rank": 128.0, "teraflops_per_rank": 0.256,
            "teraflops_per_rank_full_attention": 0.384, "mfu": 0.256, "mfu_full_attention": 0.384, "memory": 1024, "loss_scale": 1024.0,
            "bubble": 0.25,
        });
        assert_eq!(lines[1], expected);
        assert_eq!((&lines[2]["gpu_idle"], &lines[2]["gpus"][1]["memory"]), (&0.5.into(), &(3u64 << 30).into()));
        assert!(lines[2].get("mfu").is_none() && lines[2].get("bubble").is_none(), "what is not known is not there");
        assert_eq!((&lines[3]["kind"], lines[3]["perplexity"].as_f64()), (&"valid".into(), Some(2f64.exp())));
        assert_eq!((&lines[4]["kind"], &lines[4]["stall"]), (&"checkpoint".into(), &0.5.into()));
        assert_eq!((&lines[4]["bytes"], &lines[4]["share"]), (&1000.into(), &0.01.into()));
        assert_eq!((&lines[0]["kind"], &lines[0]["step"]), (&"resumed".into(), &2.into()));

        let scalars = scalars(&lines[1]);
        assert_eq!(scalars.len(), expected.as_object().unwrap().len() - 2, "all but kind and step");
        assert!(scalars.contains(&("train/grad_norm".to_string(), 0.5)), "{scalars:?}");
        let board = fs::read_dir(folder.path().join("board")).unwrap().next().unwrap().unwrap();
        let bytes = fs::read(board.path()).unwrap();
        for tag in scalars.iter().map(|(tag, _)| tag.as_str()).chain(["valid/perplexity", "checkpoint/bytes"]) {
            assert!(bytes.windows(tag.len()).any(|window| window == tag.as_bytes()), "{tag}");
        }
    }

    #[test]
    fn experts_have_their_tokens_by_layer_and_a_few_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let files = LogFiles::within(folder.path());
        let load = |layer, tokens: &[u64]| ExpertLoad {
            layer,
            tokens: tokens.to_vec(),
            dropped: 2,
            entropy: 0.5,
            auxiliary: [(Auxiliary::LoadBalancing, 1.5)].into(),
            ..ExpertLoad::default()
        };
        let stats = StepStats { experts: vec![load(0, &[4, 4]), load(1, &[2, 6])], ..step(1) };
        RunLog::open(&files, 0).unwrap().train(&stats).unwrap();
        let line: Value = serde_json::from_slice(&fs::read(&files.jsonl).unwrap()).unwrap();
        assert_eq!(line["experts"][1]["tokens"], serde_json::json!([2, 6]));
        assert_eq!(line["experts"][0]["auxiliary"], serde_json::json!({ "load_balancing": 1.5 }));
        let scalars = scalars(&line);
        for (name, value) in
            [("expert_balance", 1.5), ("dropped_tokens", 0.25), ("router_entropy", 0.5), ("load_balancing_loss", 1.5)]
        {
            assert!(scalars.contains(&(format!("train/{name}"), value)), "{name}: {scalars:?}");
        }
        assert!(line.get("z_loss").is_none());
    }

    #[test]
    fn a_loss_that_is_no_number_stays_visible() {
        let folder = tempfile::tempdir().unwrap();
        let files = LogFiles::within(folder.path());
        RunLog::open(&files, 0).unwrap().train(&StepStats { loss: f64::NAN, ..step(1) }).unwrap();
        let line: Value = serde_json::from_slice(&fs::read(&files.jsonl).unwrap()).unwrap();
        assert!(line["loss"].is_null());
        let loss = scalars(&line).into_iter().find(|(tag, _)| tag == "train/loss").unwrap();
        assert!(loss.1.is_nan());
    }
}
