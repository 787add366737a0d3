//! Where the numbers of a run go.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;

/// An entry of a run's log: a step, a validation, a checkpoint that is complete, or the start of a resumed run.
#[derive(Clone, Copy, Debug)]
pub struct LogEntry<'a> {
    /// `train`, `valid`, `checkpoint` or `resumed`.
    pub kind: &'static str,
    /// The step that it is about.
    pub step: u64,
    /// All of it as a JSON object.
    pub value: &'a Value,
    /// The same as text, a line of `steps.jsonl`.
    pub line: &'a str,
}

impl LogEntry<'_> {
    /// The numbers of the entry but for its step, each under the entry's kind, for example `train/loss`. What JSON
    /// cannot say is `null` there, and NaN.
    pub fn scalars(&self) -> Vec<(String, f64)> {
        let fields = self.value.as_object().into_iter().flatten().filter(|(name, _)| *name != "step");
        let number = |value: &Value| match value {
            Value::Null => Some(f64::NAN),
            Value::Bool(yes) => Some(f64::from(*yes)),
            value => value.as_f64(),
        };
        fields.filter_map(|(name, value)| Some((format!("{}/{name}", self.kind), number(value)?))).collect()
    }
}

/// Takes the entries of a run's log as they come, on the thread of rank 0: a tracking service, a database, a test. A
/// run's own files are two of them; [`Pretraining::metrics_sink`](crate::learner::Pretraining::metrics_sink) adds others.
///
/// ```
/// use std::io;
/// use burn_megatron::metrics::{LogEntry, MetricsSink};
///
/// struct Losses(std::sync::mpsc::Sender<f64>);
///
/// impl MetricsSink for Losses {
///     fn entry(&mut self, entry: &LogEntry) -> io::Result<()> {
///         let losses = entry.scalars().into_iter().filter(|(name, _)| name == "train/loss");
///         losses.into_iter().try_for_each(|(_, loss)| self.0.send(loss).map_err(io::Error::other))
///     }
/// }
/// ```
pub trait MetricsSink: Send {
    /// Takes an entry. The next step waits for it, so what is slow belongs into a thread of its own. The error has the
    /// cause, which ends the run.
    fn entry(&mut self, entry: &LogEntry) -> io::Result<()>;

    /// The run has done what it was to do, or was asked to stop. A sink that is dropped without is one of a run that
    /// failed. The error has the cause.
    fn end(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The sinks of a run, which its trainings share.
#[derive(Clone, Default)]
pub(crate) struct Sinks(Arc<Mutex<Vec<Box<dyn MetricsSink>>>>);

impl Sinks {
    pub fn add(&self, sink: impl MetricsSink + 'static) {
        self.0.lock().push(Box::new(sink));
    }
}

impl MetricsSink for Sinks {
    fn entry(&mut self, entry: &LogEntry) -> io::Result<()> {
        let mut sinks = self.0.lock();
        sinks.iter_mut().try_for_each(|sink| sink.entry(entry))
    }

    fn end(&mut self) -> io::Result<()> {
        let mut sinks = self.0.lock();
        sinks.iter_mut().try_for_each(|sink| sink.end())
    }
}
