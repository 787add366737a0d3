//! What a run tells in words instead of numbers: its checkpoints, its GPUs.

use std::sync::Arc;

use burn::tensor::TensorReadError;
use burn::train::metric::{Metric, MetricMetadata, MetricName, SerializedEntry};

use super::{RankReading, SaveStats, StepStats};

/// The last that was said; a new epoch does not undo it.
#[derive(Clone)]
pub struct Words<Input> {
    name: MetricName,
    last: String,
    /// `None` where there is nothing new to say.
    describe: fn(&Input) -> Option<String>,
}

/// The last checkpoint that became complete: its step, how long training stood still, how fast it was written.
pub fn checkpoints() -> Words<Option<SaveStats>> {
    let describe = |saved: &Option<SaveStats>| saved.as_ref().map(SaveStats::to_string);
    Words { name: Arc::new("Checkpoint".to_string()), last: "none yet".to_string(), describe }
}

/// Memory in use and utilisation of every rank's GPU in the last step.
pub fn gpus() -> Words<StepStats> {
    let describe = |step: &StepStats| Some(describe_gpus(&step.gpus));
    Words { name: Arc::new("GPUs".to_string()), last: String::new(), describe }
}

/// `0: 101.2 GiB 98 %, 1: 101.4 GiB 97 %`
fn describe_gpus(gpus: &[RankReading]) -> String {
    let describe = |(rank, gpu): (usize, &RankReading)| {
        let memory = gpu.memory.map(|bytes| format!(" {:.1} GiB", bytes as f64 / (1u64 << 30) as f64));
        let utilisation = gpu.utilisation.map(|percent| format!(" {percent:.0} %"));
        format!("{rank}:{}{}", memory.unwrap_or_default(), utilisation.unwrap_or_default())
    };
    gpus.iter().enumerate().map(describe).collect::<Vec<_>>().join(", ")
}

impl<Input: Clone + Send + Sync + 'static> Metric for Words<Input> {
    type Input = Input;

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn update(&mut self, input: &Input, _: &MetricMetadata) -> Result<SerializedEntry, TensorReadError> {
        if let Some(words) = (self.describe)(input) {
            self.last = words;
        }
        self.compute()
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        Ok(SerializedEntry::new(self.last.clone(), self.last.clone()))
    }

    fn clear(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_gpu_has_its_memory_and_utilisation() {
        let gpu = |memory, utilisation| RankReading { memory, utilisation, ..RankReading::default() };
        let text = describe_gpus(&[gpu(Some(3 << 29), Some(97.6)), gpu(None, None)]);
        assert_eq!(text, "0: 1.5 GiB 98 %, 1:");
    }
}
