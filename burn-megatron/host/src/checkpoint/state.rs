//! Where a run stands, apart from its tensors.

use layouts::mesh::ParallelLayout;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Everything apart from its tensors that a run needs to resume as if it had not stopped.
///
/// The values of type [`Value`] belong to whoever saves; a checkpoint stores and returns them. JSON numbers keep 64-bit
/// integers exactly; a float that must come back bit for bit belongs in a string or as its bits.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunState {
    /// Training steps done, those that were skipped included.
    pub step: u64,
    /// Training samples consumed.
    pub consumed_samples: u64,
    /// Optimizer updates done.
    pub updates: u64,
    /// Samples of the steps that were skipped, which the learning rate does not count; `None` if an older program
    /// saved.
    pub skipped_samples: Option<u64>,
    /// Layout of the run that saved; a checkpoint loads into any other.
    pub layout: ParallelLayout,
    /// Ranks of the run that saved.
    pub world_size: usize,
    /// The model's family and sizes.
    pub model: Value,
    /// The run's full resolved configuration.
    pub config: Value,
    /// What fixes the order of samples: identity of the data, seeds, lengths.
    pub data: Value,
    /// The learning rate schedule.
    pub schedule: Value,
    /// Keys of random numbers.
    pub rng: Value,
    /// Loss scale of an `f16` run; null for other types.
    #[serde(default)]
    pub loss_scale: Value,
    /// Histories of delayed FP8 scaling; null for other runs.
    #[serde(default)]
    pub fp8: Value,
    /// Losses and gradient norms that spikes are measured by; null if an older program saved.
    #[serde(default)]
    pub anomalies: Value,
    /// Where the run was told to begin: the step of a checkpoint in the folder that this one is in. Later ones there that
    /// do not say the same are of a run that was given up. `None` if it was not told so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub begun_from: Option<u64>,
}

impl RunState {
    /// Name of the first field in which two ranks' states differ.
    pub(super) fn difference(&self, other: &Self) -> Option<&'static str> {
        let fields = [
            ("step", self.step == other.step),
            ("consumed_samples", self.consumed_samples == other.consumed_samples),
            ("updates", self.updates == other.updates),
            ("skipped_samples", self.skipped_samples == other.skipped_samples),
            ("layout", self.layout == other.layout),
            ("world_size", self.world_size == other.world_size),
            ("model", self.model == other.model),
            ("config", self.config == other.config),
            ("data", self.data == other.data),
            ("schedule", self.schedule == other.schedule),
            ("rng", self.rng == other.rng),
            ("loss_scale", self.loss_scale == other.loss_scale),
            ("fp8", self.fp8 == other.fp8),
            ("anomalies", self.anomalies == other.anomalies),
            ("begun_from", self.begun_from == other.begun_from),
        ];
        fields.into_iter().find(|(_, equal)| !equal).map(|(field, _)| field)
    }
}
