//! The checkpoints of a run, in words.

use std::sync::Arc;

use burn::tensor::TensorReadError;
use burn::train::metric::{Metric, MetricMetadata, MetricName, SerializedEntry};

use super::stats::SaveStats;

/// The last checkpoint that became complete: its step, how long training stood still, how fast it was written.
#[derive(Clone)]
pub struct Checkpoints {
    name: MetricName,
    last: String,
}

impl Checkpoints {
    /// A metric of a run that has not saved yet.
    pub fn new() -> Self {
        Self { name: Arc::new("Checkpoint".to_string()), last: "none yet".to_string() }
    }

    fn entry(&self) -> SerializedEntry {
        SerializedEntry::new(self.last.clone(), self.last.clone())
    }
}

impl Default for Checkpoints {
    fn default() -> Self {
        Self::new()
    }
}

impl Metric for Checkpoints {
    type Input = Option<SaveStats>;

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn update(&mut self, saved: &Self::Input, _: &MetricMetadata) -> Result<SerializedEntry, TensorReadError> {
        if let Some(saved) = saved {
            self.last = saved.to_string();
        }
        Ok(self.entry())
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(self.entry())
    }

    /// A new epoch does not undo a save.
    fn clear(&mut self) {}
}
