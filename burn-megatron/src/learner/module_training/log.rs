//! The lines of a run's log, from burn-train's metrics.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use burn::train::logger::MetricLogger;
use burn::train::metric::store::{EpochSummary, MetricsUpdate, Split};
use burn::train::metric::{MetricDefinition, MetricId, NumericEntry};
use burn::train::train::WorkerFailure;
use burn::train::{Interrupter, TrainingError};
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::json;

use super::optimizer::Rate;
use crate::metrics::RunLog;

/// Means of a step, or of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Means {
    /// Of micro-batches' means.
    pub loss: f64,
    /// The share of the targets that are the likeliest class or token; none if nothing is a target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
}

/// Loss, accuracy in percent, and targets of a micro-batch.
type Output = (f64, Option<(f64, usize)>);

/// Writes the means of every step and of every evaluation.
pub(super) struct StepLog {
    pub log: RunLog,
    /// Of the run's first step on.
    pub rate: Rate,
    /// Outputs of a step: micro-batches of all data-parallel ranks.
    pub outputs: usize,
    pub interrupter: Interrupter,
    pub held_out: Arc<Mutex<Option<Means>>>,
    names: HashMap<MetricId, String>,
    train: Vec<Output>,
    evaluation: Vec<Output>,
    since: Instant,
}

impl StepLog {
    pub fn new(log: RunLog, rate: Rate, outputs: usize, interrupter: Interrupter) -> Self {
        let (names, train, evaluation) = (HashMap::new(), Vec::new(), Vec::new());
        let (held_out, since) = (Arc::default(), Instant::now());
        Self { log, rate, outputs, interrupter, held_out, names, train, evaluation, since }
    }

    fn train(&mut self, output: Output) -> io::Result<()> {
        self.train.push(output);
        if self.train.len() < self.outputs {
            return Ok(());
        }
        let Means { loss, accuracy } = means(&std::mem::take(&mut self.train));
        let rate = burn::lr_scheduler::LrScheduler::step(&mut self.rate);
        let seconds = std::mem::replace(&mut self.since, Instant::now()).elapsed().as_secs_f64();
        let (step, sequences) = (self.rate.steps, self.rate.samples);
        let mut line = json!({"step": step, "loss": loss, "lr": rate, "sequences": sequences, "seconds": seconds});
        if let Some(accuracy) = accuracy {
            line["accuracy"] = accuracy.into();
        }
        self.log.entry("train", step, line)
    }

    /// The numbers of a metric in an update, and of how many items they are.
    fn entry(&self, update: &MetricsUpdate, name: &str) -> Option<(f64, usize)> {
        let is_it = |metric: &MetricId| self.names.get(metric).is_some_and(|known| known == name);
        let found = update.entries_numeric.iter().find(|numeric| is_it(&numeric.entry.metric_id))?;
        match found.numeric_entry.clone()? {
            NumericEntry::Value(value) => Some((value, 1)),
            NumericEntry::Aggregated { aggregated_value, count } => Some((aggregated_value, count)),
            NumericEntry::Final(_) => None,
        }
    }

    fn noted(&self, result: io::Result<()>) {
        if let Err(error) = result {
            let failure = WorkerFailure { device_id: 0, message: format!("the log cannot be written: {error}") };
            self.interrupter.fail(TrainingError::Workers(vec![failure]));
        }
    }
}

fn means(outputs: &[Output]) -> Means {
    let loss = outputs.iter().map(|(loss, _)| loss).sum::<f64>() / outputs.len() as f64;
    // A micro-batch without targets has no accuracy.
    let counted = || outputs.iter().filter_map(|(_, accuracy)| *accuracy).filter(|(_, targets)| *targets > 0);
    let targets: usize = counted().map(|(_, targets)| targets).sum();
    let right: f64 = counted().map(|(percent, targets)| percent / 100.0 * targets as f64).sum();
    Means { loss, accuracy: (targets > 0).then(|| right / targets as f64) }
}

impl MetricLogger for StepLog {
    fn log(&mut self, update: MetricsUpdate, _: usize, split: &Split) {
        let Some((loss, _)) = self.entry(&update, "Loss") else { return };
        let output = (loss, self.entry(&update, "Accuracy"));
        match split {
            Split::Train => {
                let written = self.train(output);
                self.noted(written);
            }
            _ => self.evaluation.push(output),
        }
    }

    fn read_numeric(&mut self, name: &str, _: usize, _: &Split) -> Result<Vec<NumericEntry>, String> {
        Err(format!("{name} is in burn-train's own files"))
    }

    fn log_metric_definition(&mut self, definition: MetricDefinition) {
        self.names.insert(definition.metric_id, definition.name.to_string());
    }

    fn log_epoch_summary(&mut self, summary: EpochSummary) {
        let outputs = std::mem::take(&mut self.evaluation);
        self.since = Instant::now();
        if summary.split == Split::Valid && !outputs.is_empty() {
            let (means, step) = (means(&outputs), self.rate.steps);
            *self.held_out.lock() = Some(means);
            let mut line = json!(means);
            line["step"] = step.into();
            let written = self.log.entry("valid", step, line);
            self.noted(written);
        }
    }
}
