//! What FP8 layers keep from step to step.

use std::collections::BTreeMap;

use super::RankEngine;
use backend_dist::mesh::Axis;
use backend_dist::ops::fp8::{Fp8Layers, LayerHistory};
use models::CausalLm;
use serde_json::Value;

impl<M: CausalLm> RankEngine<M> {
    /// All weights are new: those of a model that was built or read from a checkpoint.
    pub(super) fn all_weights_changed(&self) {
        if self.config.keep_fp8_weights {
            self.chunks.iter().for_each(|chunk| chunk.model().registry().fp8().frozen_weights_changed());
        }
        self.weights_changed();
    }

    /// Quantised weights of the last step are stale, and so is their amax. Under ZeRO 3, where trained weights are here only
    /// while they are used, none of them is kept; where the configuration says so, none at all.
    pub(super) fn weights_changed(&self) {
        let layout = self.rank.mesh.layout();
        let come_and_go = self.model_parallel.iter().any(|(grid, _)| layout.zero_stage(*grid) == 3);
        let report = match self.config.keep_fp8_weights && !come_and_go {
            true => Fp8Layers::weights_changed,
            false => Fp8Layers::weights_may_change,
        };
        self.chunks.iter().for_each(|chunk| report(chunk.model().registry().fp8()));
        self.fp8.forget_weights();
    }

    /// Moves the histories of delayed scaling on. They belong to the next step's scales, also where this one was
    /// skipped.
    pub(super) fn end_fp8_step(&mut self) {
        let groups = [self.rank.group(Axis::Tp), self.dp_ranks.clone()];
        self.fp8.end_step(&groups, &self.rank.device, self.dtype);
        self.weights_changed();
    }

    /// The histories of delayed scaling of the whole model, by layer; null where there are none. All ranks call it
    /// together, and it waits for the device.
    pub fn fp8_state(&self) -> Value {
        let parts = self.stages.all_gather_host(self.fp8.state());
        let all: BTreeMap<String, LayerHistory> = parts.into_iter().flatten().collect();
        if all.is_empty() { Value::Null } else { serde_json::to_value(all).expect("plain data") }
    }

    /// Takes the histories up; what has none starts anew.
    pub(super) fn restore_fp8(&mut self, state: &Value) {
        let state: BTreeMap<String, LayerHistory> = serde_json::from_value(state.clone()).unwrap_or_default();
        self.fp8.restore(&state, &self.rank.device, self.dtype);
        self.all_weights_changed();
    }
}
