//! Whether a run can have the optimizer states that it names.

use super::check::demand;
use super::decoder::decoder_of;
use super::run::{Precision, RunConfig};
use crate::optim::{AdamWConfig, MainParamsDtype, OptimizerConfig, StateDtype};

impl RunConfig {
    /// Types of optimizer states that the type of training does not have.
    pub(super) fn check_states(&self, note: &mut impl FnMut(Result<(), String>)) {
        let (states, dtype) = (self.optimizer.states(), self.training.dtype);
        let name = format!("{dtype:?}").to_lowercase();
        for (key, state) in [("exp-avg-dtype", states.exp_avg), ("exp-avg-sq-dtype", states.exp_avg_sq)] {
            note(demand(state == StateDtype::F32 || dtype != Precision::F64, || {
                let state = state.name();
                format!(
                    "optimizer.{key} = {state} with training.dtype = {name}, whose states are f64; nearest legal: f32, which \
                     leaves them so"
                )
            }));
        }
        let moments = [states.exp_avg, states.exp_avg_sq];
        let in_blocks = moments.map(|moment| moment == StateDtype::Bits8);
        note(demand(in_blocks[0] == in_blocks[1], || {
            let [first, second] = moments.map(StateDtype::name);
            format!(
                "optimizer.exp-avg-dtype = {first} and optimizer.exp-avg-sq-dtype = {second}: moments are in 8 bits both or \
                 not at all; nearest legal: 8bit for both"
            )
        }));
        if let OptimizerConfig::AdamW(AdamWConfig { cpu_offload, offload_fraction: share, .. }) = self.optimizer {
            note(demand(share > 0.0 && share <= 1.0, || {
                format!("optimizer.offload-fraction = {share} is not above 0 and at most 1; nearest legal: 1.0")
            }));
            note(demand(cpu_offload || share == 1.0, || {
                format!(
                    "optimizer.offload-fraction = {share} without optimizer.cpu-offload, so that no states are in host memory; \
                     nearest legal: optimizer.cpu-offload = true"
                )
            }));
            note(demand(!cpu_offload || self.training.ema_decay.is_none(), || {
                "optimizer.cpu-offload = true with training.ema-decay, whose average follows master weights that are on the \
                 GPU; nearest legal: optimizer.cpu-offload = false"
                    .into()
            }));
        }
        let adds_in_bf16 = dtype == Precision::Bf16 && self.fp8.format.is_none();
        // Of sizes that make no model nothing follows.
        let is_dense = || !self.is_sound() || decoder_of(&self.model.config).is_dense();
        note(demand(states.main_grads == StateDtype::F32 || adds_in_bf16 && is_dense(), || {
            format!(
                "optimizer.main-grads-dtype = bf16 with training.dtype = {name}{}{}: only gradients of dense layers in bf16 are \
                 accumulated in bf16; nearest legal: f32",
                if self.fp8.format.is_some() { " and FP8 layers" } else { "" },
                if is_dense() { "" } else { " and layers that are not dense" }
            )
        }));
        note(demand(states.main_params == MainParamsDtype::F32 || dtype == Precision::Bf16, || {
            format!(
                "optimizer.main-params-dtype = bf16-remainder with training.dtype = {name}: only bf16 weights have \
                 remainders; nearest legal: f32"
            )
        }));
    }
}
