//! A burn-train renderer that writes one line per step: for files, pipes, CI and batch systems.

use std::io::Write;

use burn::data::dataloader::Progress;
use burn::train::LearnerSummary;
use burn::train::logger::{EvaluationProgressLogger, TrainingProgressLogger};
use burn::train::metric::{MetricAttributes, MetricDefinition, MetricEntry, MetricId};
use burn::train::renderer::{
    EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation, MetricsRendererTraining,
};

use super::format::{duration, quantity};

/// Unit of the progress of a split that is measured in optimizer steps.
pub const STEPS: &str = "steps";

/// Writes `step 3/400 | Loss 5.1234 | …` once per training step and `valid …` once per validation.
pub struct LogRenderer {
    out: Box<dyn Write + Send + Sync>,
    metrics: Vec<Metric>,
    epoch: usize,
    epochs: usize,
    split: Split,
    printed: Option<usize>,
    last_step: String,
    started: std::time::Instant,
    /// Steps of the whole run and of an epoch, if they are counted.
    steps: Option<(usize, usize)>,
}

#[derive(Clone, Copy, PartialEq)]
enum Split {
    Train,
    Valid,
}

struct Metric {
    id: MetricId,
    name: String,
    unit: Option<String>,
    train: Option<f64>,
    valid: Option<f64>,
    /// Last value of a textual metric.
    text: String,
}

impl LogRenderer {
    /// Writes to stdout.
    pub fn stdout() -> Self {
        Self::new(std::io::stdout())
    }

    /// Writes to `out`.
    pub fn new(out: impl Write + Send + Sync + 'static) -> Self {
        Self {
            out: Box::new(out),
            metrics: Vec::new(),
            epoch: 1,
            epochs: 0,
            split: Split::Train,
            printed: None,
            last_step: String::new(),
            started: std::time::Instant::now(),
            steps: None,
        }
    }

    /// Counts steps over the whole run of `total` steps, `per_epoch` in each epoch, instead of items in their epoch.
    pub fn counting_steps(mut self, total: usize, per_epoch: usize) -> Self {
        self.steps = Some((total, per_epoch));
        self
    }

    /// A closed pipe must not end a training, so a failed write is dropped.
    fn line(&mut self, line: &str) {
        let _ = writeln!(self.out, "{line}").and_then(|()| self.out.flush());
    }

    fn record(&mut self, split: Split, state: MetricState) {
        let (entry, value) = match state {
            MetricState::Numeric(entry, Some(value)) => (entry, value),
            MetricState::Numeric(_, None) => return,
            MetricState::Generic(entry) => return self.tell(&entry),
        };
        if let Some(metric) = self.metrics.iter_mut().find(|metric| metric.id == entry.metric_id) {
            match split {
                Split::Train => metric.train = Some(value.current()),
                Split::Valid => metric.valid = Some(value.current()),
            }
        }
    }

    /// A textual metric gets a line of its own when its value changes.
    fn tell(&mut self, entry: &MetricEntry) {
        let text = &entry.serialized_entry.formatted;
        let Some(metric) = self.metrics.iter_mut().find(|metric| metric.id == entry.metric_id) else { return };
        let news = !metric.text.is_empty() && metric.text != *text;
        metric.text.clone_from(text);
        if news {
            let line = format!("{} {text}", metric.name.to_lowercase());
            self.line(&line);
        }
    }

    fn values(&self, split: Split) -> String {
        let value = |metric: &Metric| match split {
            Split::Train => metric.train,
            Split::Valid => metric.valid,
        };
        let show = |metric: &Metric| {
            value(metric)
                .map(|value| format!(" | {} {}", metric.name.to_lowercase(), quantity(value, metric.unit.as_deref())))
        };
        self.metrics.iter().filter_map(show).collect()
    }

    /// `step 62/400` if steps are counted, else `epoch 2/8, items 12/50`.
    fn position(&self, progress: &Progress) -> String {
        match self.steps {
            Some((total, per_epoch)) => {
                let step = (self.epoch - 1) * per_epoch + progress.items_processed;
                format!("step {step:>width$}/{total}", width = total.to_string().len())
            }
            None => {
                let unit = progress.unit.as_deref().unwrap_or("items");
                format!("epoch {}/{}, {unit} {progress}", self.epoch, self.epochs)
            }
        }
    }
}

impl MetricsRendererTraining for LogRenderer {
    fn update_train(&mut self, state: MetricState) {
        self.record(Split::Train, state);
    }

    fn update_valid(&mut self, state: MetricState) {
        self.record(Split::Valid, state);
    }

    fn on_train_end(&mut self, summary: Option<LearnerSummary>) -> Result<(), Box<dyn std::error::Error>> {
        if let Some(summary) = summary {
            self.line(&summary.to_string());
        }
        Ok(())
    }
}

impl TrainingProgressLogger for LogRenderer {
    fn start(&mut self, total_epochs: usize, starting_epoch: usize, _: Option<usize>, label: Option<&str>) {
        self.epochs = total_epochs;
        self.epoch = starting_epoch;
        self.started = std::time::Instant::now();
        if let Some(label) = label {
            self.line(label);
        }
    }

    fn update_epoch(&mut self, epoch: usize) {
        self.epoch = epoch + 1;
    }

    fn start_split(&mut self, split: &str, _: &Progress) {
        self.split = if split == "train" { Split::Train } else { Split::Valid };
        self.printed = None;
    }

    fn update_split(&mut self, progress: &Progress) {
        // Several ranks may report the same step: the first report is its line.
        if self.split == Split::Train && self.printed != Some(progress.items_processed) {
            self.printed = Some(progress.items_processed);
            self.last_step = self.position(progress);
            let line = format!("{}{}", self.last_step, self.values(Split::Train));
            self.line(&line);
        }
    }

    fn end_split(&mut self, progress: &Progress) {
        if self.split == Split::Valid && progress.items_processed > 0 {
            // A resumed run may begin with the evaluation that it owes.
            let after =
                if self.last_step.is_empty() { String::new() } else { format!(" after {}", self.last_step.trim()) };
            let line = format!("validation{after}{}", self.values(Split::Valid));
            self.line(&line);
        }
        self.split = Split::Train;
    }

    fn end(&mut self) {
        let line = format!("training ended after {}", duration(self.started.elapsed().as_secs_f64()));
        self.line(&line);
    }

    fn log_event_training(&mut self, _: String) {}
}

impl EvaluationProgressLogger for LogRenderer {
    fn start_global_progress(&mut self, _: usize) {}

    fn start_test(&mut self, name: &str, _: &Progress) {
        self.metrics.iter_mut().for_each(|metric| metric.valid = None);
        self.last_step = format!("test {name}");
    }

    fn update_test_progress(&mut self, _: &Progress) {}

    fn end_test(&mut self, _: &Progress) {
        let line = format!("{}{}", self.last_step, self.values(Split::Valid));
        self.line(&line);
    }

    fn end_global_progress(&mut self) {}

    fn log_event_evaluation(&mut self, _: String) {}
}

impl MetricsRendererEvaluation for LogRenderer {
    fn update_test(&mut self, _: EvaluationName, state: MetricState) {
        self.record(Split::Valid, state);
    }
}

impl MetricsRenderer for LogRenderer {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        let unit = match definition.attributes {
            MetricAttributes::Numeric(attributes) => attributes.unit,
            MetricAttributes::None => None,
        };
        let name = definition.name.to_string();
        self.metrics.push(Metric {
            id: definition.metric_id,
            name,
            unit,
            train: None,
            valid: None,
            text: String::new(),
        });
    }
}

#[cfg(test)]
mod tests;
