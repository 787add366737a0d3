//! A metric that fails.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use burn::tensor::TensorReadError;
use burn::train::metric::{Metric, MetricMetadata, MetricName, SerializedEntry};

/// Panics in an iteration, after a while, as a metric does that waits for a GPU.
#[derive(Clone)]
pub struct Panics {
    pub at: usize,
}

impl Metric for Panics {
    type Input = ();

    fn name(&self) -> MetricName {
        Arc::new("Panics".into())
    }

    fn update(&mut self, (): &(), metadata: &MetricMetadata) -> Result<SerializedEntry, TensorReadError> {
        if metadata.iteration == Some(self.at) {
            thread::sleep(Duration::from_millis(300));
            panic!("the metric ran into a wall");
        }
        self.compute()
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(SerializedEntry::new("-".into(), "0".into()))
    }

    fn clear(&mut self) {}
}
