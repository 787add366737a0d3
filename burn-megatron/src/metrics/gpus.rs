//! The GPUs of a run, in words.

use std::sync::Arc;

use burn::tensor::TensorReadError;
use burn::train::metric::{Metric, MetricMetadata, MetricName, SerializedEntry};

use super::{RankReading, StepStats};

/// Memory in use and utilisation of every rank's GPU in the last step.
#[derive(Clone)]
pub struct Gpus {
    name: MetricName,
    last: String,
}

impl Gpus {
    /// A metric before the first step.
    pub fn new() -> Self {
        Self { name: Arc::new("GPUs".to_string()), last: String::new() }
    }

    fn entry(&self) -> SerializedEntry {
        SerializedEntry::new(self.last.clone(), self.last.clone())
    }
}

impl Default for Gpus {
    fn default() -> Self {
        Self::new()
    }
}

/// `0: 101.2 GiB 98 %, 1: 101.4 GiB 97 %`
fn describe(gpus: &[RankReading]) -> String {
    let describe = |(rank, gpu): (usize, &RankReading)| {
        let memory = gpu.memory.map(|bytes| format!(" {:.1} GiB", bytes as f64 / (1u64 << 30) as f64));
        let utilisation = gpu.utilisation.map(|percent| format!(" {percent:.0} %"));
        format!("{rank}:{}{}", memory.unwrap_or_default(), utilisation.unwrap_or_default())
    };
    gpus.iter().enumerate().map(describe).collect::<Vec<_>>().join(", ")
}

impl Metric for Gpus {
    type Input = StepStats;

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn update(&mut self, step: &StepStats, _: &MetricMetadata) -> Result<SerializedEntry, TensorReadError> {
        self.last = describe(&step.gpus);
        Ok(self.entry())
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(self.entry())
    }

    /// A GPU stays as full as it was.
    fn clear(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_gpu_has_its_memory_and_utilisation() {
        let gpu = |memory, utilisation| RankReading { memory, utilisation, ..RankReading::default() };
        let text = describe(&[gpu(Some(3 << 29), Some(97.6)), gpu(None, None)]);
        assert_eq!(text, "0: 1.5 GiB 98 %, 1:");
    }
}
