//! The lines of a run's log, from burn-train's metrics.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use burn::train::Interrupter;
use burn::train::logger::MetricLogger;
use burn::train::metric::store::{EpochSummary, MetricsUpdate, Split};
use burn::train::metric::{MetricDefinition, MetricId, NumericEntry};
use parking_lot::Mutex;
use serde_json::json;

use super::optimizer::Rate;
use crate::metrics::RunLog;

/// Writes the mean loss of every step and of every evaluation.
pub(super) struct StepLog {
    pub log: RunLog,
    /// Of the run's first step on.
    pub rate: Rate,
    /// Outputs of a step: micro-batches of all data-parallel ranks.
    pub outputs: usize,
    pub interrupter: Interrupter,
    pub held_out: Arc<Mutex<Option<f64>>>,
    names: HashMap<MetricId, String>,
    losses: Vec<f64>,
    held_out_losses: Vec<f64>,
    since: Instant,
}

impl StepLog {
    pub fn new(log: RunLog, rate: Rate, outputs: usize, interrupter: Interrupter) -> Self {
        let (names, losses, held_out_losses) = (HashMap::new(), Vec::new(), Vec::new());
        let (held_out, since) = (Arc::default(), Instant::now());
        Self { log, rate, outputs, interrupter, held_out, names, losses, held_out_losses, since }
    }

    fn train(&mut self, loss: f64) -> io::Result<()> {
        self.losses.push(loss);
        if self.losses.len() < self.outputs {
            return Ok(());
        }
        let loss = mean(&std::mem::take(&mut self.losses));
        let rate = burn::lr_scheduler::LrScheduler::step(&mut self.rate);
        let seconds = std::mem::replace(&mut self.since, Instant::now()).elapsed().as_secs_f64();
        let (step, sequences) = (self.rate.steps, self.rate.samples);
        let line = json!({"step": step, "loss": loss, "lr": rate, "sequences": sequences, "seconds": seconds});
        self.log.entry("train", step, line)
    }

    fn noted(&self, result: io::Result<()>) {
        if let Err(error) = result {
            self.interrupter.stop(Some(&format!("the log cannot be written: {error}")));
        }
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

impl MetricLogger for StepLog {
    fn log(&mut self, update: MetricsUpdate, _: usize, split: &Split) {
        for numeric in update.entries_numeric {
            let is_loss = self.names.get(&numeric.entry.metric_id).is_some_and(|name| name == "Loss");
            let (true, Some(value @ (NumericEntry::Value(_) | NumericEntry::Aggregated { .. }))) =
                (is_loss, numeric.numeric_entry)
            else {
                continue;
            };
            match split {
                Split::Train => {
                    let written = self.train(value.current());
                    self.noted(written);
                }
                _ => self.held_out_losses.push(value.current()),
            }
        }
    }

    fn read_numeric(&mut self, name: &str, _: usize, _: &Split) -> Result<Vec<NumericEntry>, String> {
        Err(format!("{name} is in burn-train's own files"))
    }

    fn log_metric_definition(&mut self, definition: MetricDefinition) {
        self.names.insert(definition.metric_id, definition.name.to_string());
    }

    fn log_epoch_summary(&mut self, summary: EpochSummary) {
        let losses = std::mem::take(&mut self.held_out_losses);
        self.since = Instant::now();
        if summary.split == Split::Valid && !losses.is_empty() {
            let (loss, step) = (mean(&losses), self.rate.steps);
            *self.held_out.lock() = Some(loss);
            let written = self.log.entry("valid", step, json!({"step": step, "loss": loss}));
            self.noted(written);
        }
    }
}
