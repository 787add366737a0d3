//! A burn-train renderer that writes one line per step: for files, pipes, CI and batch systems.

use std::io::Write;

use burn::data::dataloader::Progress;
use burn::train::LearnerSummary;
use burn::train::logger::{EvaluationProgressLogger, TrainingProgressLogger};
use burn::train::metric::{MetricAttributes, MetricDefinition, MetricId};
use burn::train::renderer::{
    EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation, MetricsRendererTraining,
};

use super::format::{duration, quantity};

/// Unit of the progress of a split that is measured in optimizer steps.
pub const STEPS: &str = "steps";

/// Writes `step 3/400 | Loss 5.1234 | …` once per training step and `valid …` once per validation.
pub struct LogRenderer {
    out: Box<dyn Write + Send + Sync>,
    metrics: Vec<Row>,
    epoch: usize,
    epochs: usize,
    split: Split,
    printed: Option<usize>,
    last_step: String,
    started: std::time::Instant,
    /// Steps done and steps of the whole run, if they are counted.
    steps: Option<(usize, usize)>,
}

#[derive(Clone, Copy, PartialEq)]
enum Split {
    Train,
    Valid,
}

struct Row {
    id: MetricId,
    name: String,
    unit: Option<String>,
    train: Option<f64>,
    valid: Option<f64>,
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

    /// Counts steps over the whole run of `total` steps, instead of items in their epoch.
    pub fn counting_steps(mut self, total: usize) -> Self {
        self.steps = Some((0, total));
        self
    }

    /// A closed pipe must not end a training, so a failed write is dropped.
    fn line(&mut self, line: &str) {
        let _ = writeln!(self.out, "{line}").and_then(|()| self.out.flush());
    }

    fn record(&mut self, split: Split, state: MetricState) {
        let MetricState::Numeric(entry, Some(value)) = state else { return };
        if let Some(row) = self.metrics.iter_mut().find(|row| row.id == entry.metric_id) {
            match split {
                Split::Train => row.train = Some(value.current()),
                Split::Valid => row.valid = Some(value.current()),
            }
        }
    }

    fn values(&self, split: Split) -> String {
        let value = |row: &Row| match split {
            Split::Train => row.train,
            Split::Valid => row.valid,
        };
        let show = |row: &Row| {
            value(row).map(|value| format!(" | {} {}", row.name.to_lowercase(), quantity(value, row.unit.as_deref())))
        };
        self.metrics.iter().filter_map(show).collect()
    }

    /// `step 62/400` where steps are counted, else `epoch 2/8, items 12/50`.
    fn position(&self, progress: &Progress) -> String {
        match self.steps {
            Some((step, total)) => format!("step {step:>width$}/{total}", width = total.to_string().len()),
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
            self.steps = self.steps.map(|(step, total)| (step + 1, total));
            self.last_step = self.position(progress);
            let line = format!("{}{}", self.last_step, self.values(Split::Train));
            self.line(&line);
        }
    }

    fn end_split(&mut self, progress: &Progress) {
        if self.split == Split::Valid && progress.items_processed > 0 {
            let line = format!("validation after {}{}", self.last_step.trim(), self.values(Split::Valid));
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
        self.metrics.iter_mut().for_each(|row| row.valid = None);
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
        self.metrics.push(Row { id: definition.metric_id, name, unit, train: None, valid: None });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use burn::train::metric::{MetricEntry, NumericAttributes, NumericEntry, SerializedEntry};

    use super::*;

    #[derive(Clone, Default)]
    struct Page(Arc<Mutex<Vec<u8>>>);

    impl Write for Page {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl Page {
        fn lines(&self) -> Vec<String> {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap().lines().map(str::to_string).collect()
        }
    }

    fn numeric(name: &str, value: f64) -> MetricState {
        let entry =
            MetricEntry::new(MetricId::new(Arc::new(name.into())), SerializedEntry::new(String::new(), String::new()));
        MetricState::Numeric(entry, Some(NumericEntry::Value(value)))
    }

    fn renderer(page: &Page) -> LogRenderer {
        let mut renderer = LogRenderer::new(page.clone());
        for (name, unit) in [("Loss", None), ("Memory", Some("MiB".to_string()))] {
            let name = Arc::new(name.to_string());
            renderer.register_metric(MetricDefinition {
                metric_id: MetricId::new(name.clone()),
                name,
                description: None,
                attributes: NumericAttributes { unit, higher_is_better: false }.into(),
            });
        }
        renderer
    }

    fn steps(done: usize, total: usize) -> Progress {
        Progress::new(done, total, Some(STEPS.to_string()))
    }

    #[test]
    fn a_step_is_one_line_and_steps_count_over_epochs() {
        let page = Page::default();
        let mut renderer = renderer(&page).counting_steps(100);
        renderer.start(2, 1, None, None);
        for (epoch, loss) in [(1, 3.0), (2, 2.5)] {
            renderer.start_split("train", &steps(0, 1));
            for reported_twice in [loss, loss + 0.25] {
                renderer.update_train(numeric("Loss", reported_twice));
                renderer.update_train(numeric("Memory", 512.0));
                renderer.update_split(&steps(1, 1));
            }
            renderer.end_split(&steps(1, 1));
            renderer.update_epoch(epoch);
        }
        renderer.start_split("valid", &steps(0, 2));
        renderer.update_valid(numeric("Loss", 2.25));
        renderer.update_split(&steps(2, 2));
        renderer.end_split(&steps(2, 2));
        assert_eq!(
            page.lines(),
            [
                "step   1/100 | loss 3.0000 | memory 512 MiB",
                "step   2/100 | loss 2.5000 | memory 512 MiB",
                "validation after step   2/100 | loss 2.2500"
            ]
        );
    }

    #[test]
    fn items_are_counted_inside_their_epoch() {
        let page = Page::default();
        let mut renderer = renderer(&page);
        renderer.start(3, 1, None, None);
        renderer.start_split("train", &Progress::new(0, None, Some("items".into())));
        renderer.update_train(numeric("Loss", 1.0));
        renderer.update_split(&Progress::new(64, None, Some("items".into())));
        assert_eq!(page.lines(), ["epoch 1/3, items 64 | loss 1.0000"]);
    }

    #[test]
    fn a_closed_pipe_does_not_end_the_run() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let mut renderer = LogRenderer::new(Closed);
        renderer.start(1, 1, None, Some("run"));
        renderer.end();
    }
}
