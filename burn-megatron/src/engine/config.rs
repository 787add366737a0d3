//! What the engine must know of a run.

use crate::batch::{BatchError, BatchPlan};
use crate::lr::LrConfig;
use crate::optim::OptimizerConfig;
use serde::{Deserialize, Serialize};

/// What the gradient is the gradient of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LossMean {
    /// The mean over all counted tokens of the global batch: the same in every layout.
    #[default]
    PerToken,
    /// Megatron's default: the mean over micro-batches of each micro-batch's mean. With uneven masks it depends on how
    /// the batch is cut (megatron/core/pipeline_parallel/schedules.py, `forward_step_calc_loss`).
    PerMicroBatch,
}

/// Batch, optimizer and schedule of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct EngineConfig {
    /// Rows per forward and backward on one data-parallel rank.
    pub micro_batch: usize,
    /// Rows per optimizer step over all ranks.
    pub global_batch: usize,
    /// Learning rate.
    pub lr: LrConfig,
    /// AdamW.
    #[serde(default)]
    pub optimizer: OptimizerConfig,
    /// Largest global gradient norm; larger ones are scaled down to it. `None` does not clip.
    #[serde(default)]
    pub clip: Option<f64>,
    /// What the gradient is the gradient of. The reported loss is always the mean over counted tokens.
    #[serde(default)]
    pub loss: LossMean,
    /// Seed of dropout. Masks depend on it, the step and the place in the global batch, not on the layout.
    #[serde(default)]
    pub seed: u64,
}

impl EngineConfig {
    /// How the global batch is cut over `data_parallel` ranks.
    ///
    /// # Errors
    /// Where the sizes do not divide.
    pub fn plan(&self, data_parallel: usize) -> Result<BatchPlan, BatchError> {
        BatchPlan::from_global(self.global_batch, self.micro_batch, data_parallel)
    }
}
