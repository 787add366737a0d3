//! What a checkpoint of ours says about its optimizer, for other systems.

use models::layout::ModelDims;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::batch::BatchSizes;
use crate::checkpoint::Checkpoint;
use crate::engine::{EngineConfig, ParamGroups};
use crate::lr::{LrConfig, LrDecay, WeightDecayConfig, WeightDecayIncr};
use crate::optim::{AdamWConfig, OptimizerConfig};

/// AdamW after some updates.
#[derive(Debug)]
pub(in crate::hf) struct Recipe {
    pub adamw: AdamWConfig,
    /// The learning rate of the next update.
    pub lr: f64,
    pub most: f64,
    pub min: f64,
    /// Samples of the warm-up, and of the whole schedule.
    pub lengths: [u64; 2],
    /// Megatron's word for the form of the schedule.
    pub form: &'static str,
    pub decay_start: f64,
    /// Megatron's word for how the weight decay grows, and the samples that it takes.
    pub growth: (&'static str, u64),
    pub updates: u64,
    /// Samples that the schedule counts.
    pub scheduled: u64,
    /// Samples of steps without an update too.
    pub consumed: u64,
    /// The model's layers, features between them, and attention heads.
    pub model: [usize; 3],
}

impl Recipe {
    /// Of a checkpoint of this model.
    ///
    /// # Errors
    /// If it has no moments, those of another optimizer, or settings that the other systems' files have no place for; the
    /// message names the key.
    pub fn of(checkpoint: &Checkpoint, model: &ModelDims) -> Result<Self, String> {
        let state = checkpoint.state();
        if state.updates == 0 {
            return Err("has no moments: its run has not updated the weights yet; leave out --optimizer".into());
        }
        let optimizer =
            part::<OptimizerConfig>(checkpoint, "optimizer").ok_or("does not say which optimizer it is of")?;
        let OptimizerConfig::AdamW(adamw) = optimizer else {
            let kind = serde_json::to_value(optimizer).unwrap_or_default()["kind"].clone();
            return Err(format!("has optimizer.kind = {kind}; legal: \"adamw\", whose states other systems have too"));
        };
        let groups = part::<ParamGroups>(checkpoint, "param-groups").or_else(|| part(checkpoint, "groups"));
        if groups.is_some_and(|groups| !(groups.lr_scale.is_empty() && groups.weight_decay_scale.is_empty())) {
            return Err("has factors in param-groups, which are not written; leave out --optimizer".into());
        }
        let lr = part::<LrConfig>(checkpoint, "lr");
        let lr =
            lr.ok_or("does not say its schedule of the learning rate ([lr]); save it from a run that continues")?;
        let engine: Option<EngineConfig> = serde_json::from_value(state.schedule.clone()).ok();
        let batch = engine.map(|engine| engine.batch_sizes());
        let batch =
            batch.unwrap_or_else(|| BatchSizes::from((state.consumed_samples / state.step.max(1)).max(1) as usize));
        let scheduled = state.consumed_samples - state.skipped_samples.unwrap_or(0);
        let schedule = lr.schedule(batch).map_err(|error| error.to_string())?;
        let decay: WeightDecayConfig = part(checkpoint, "weight-decay").unwrap_or_default();
        let grows = decay.incr_style != WeightDecayIncr::Constant;
        Ok(Self {
            adamw,
            lr: schedule.at(scheduled),
            most: lr.max,
            min: lr.min,
            lengths: [lr.warmup.samples(batch), lr.decay.samples(batch)],
            form: match lr.form {
                LrDecay::Constant => "constant",
                LrDecay::Linear => "linear",
                LrDecay::Cosine => "cosine",
                LrDecay::InverseSquareRoot => "inverse-square-root",
                LrDecay::Wsd { .. } => "WSD",
            },
            decay_start: if grows { decay.start } else { adamw.weight_decay },
            growth: match decay.incr_style {
                WeightDecayIncr::Constant => ("constant", lr.decay.samples(batch)),
                WeightDecayIncr::Linear => ("linear", decay.length.map_or(0, |length| length.samples(batch))),
                WeightDecayIncr::Cosine => ("cosine", decay.length.map_or(0, |length| length.samples(batch))),
            },
            updates: state.updates,
            scheduled,
            consumed: state.consumed_samples,
            model: [model.layers, model.hidden, model.heads],
        })
    }
}

/// A part of what the run was told: the run's own engine knows best, imported checkpoints have sections only.
fn part<T: DeserializeOwned>(checkpoint: &Checkpoint, name: &str) -> Option<T> {
    let state = checkpoint.state();
    let found = [&state.schedule, &state.config].into_iter().find_map(|told| told.get(name));
    serde_json::from_value(found.cloned().unwrap_or(Value::Null)).ok()
}
