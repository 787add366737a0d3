//! Whether the values of a configuration fit together. No file is opened.

use std::path::Path;

use models::ModelConfig;
use models::recompute::Granularity;

use super::post_training::LoraSection;
use super::problem::{ConfigErrors, Problem};
use super::run::RunConfig;
use crate::batch::BatchPlan;
use crate::checkpoint::{SaveEvery, check_storage};

impl RunConfig {
    /// Checks model, layout, batch, learning rate and data against each other.
    ///
    /// # Errors
    /// Every contradiction, with the nearest legal value where there is one.
    pub fn check(&self) -> Result<(), ConfigErrors> {
        let mut problems = self.layout_problems();
        // What cannot be split is refused already.
        let sound = BatchPlan::at(&self.batch_sizes(), 0, 1, 1).is_ok();
        let sizes = if sound { self.batch_sizes() } else { self.training.global_batch.into() };
        let mut note = |result: Result<(), String>| problems.extend(result.err().map(Problem::new));
        note(self.lr.schedule(sizes).map(drop).map_err(|error| format!("lr: {error}")));
        let decay = self.weight_decay.schedule(self.optimizer.weight_decay(), sizes);
        note(decay.map(drop).map_err(|error| error.to_string()));
        self.check_ranges(&mut note);
        if self.is_sound() {
            note(self.check_trained());
            let base = self.lora.base.filter(|_| self.lora.rank.is_some());
            note(demand(base.is_none() || self.fp8.format.is_none(), || {
                "lora.base and fp8.format: weights in few bits are multiplied in training.dtype; nearest legal: fp8.format = none"
                    .into()
            }));
        }
        self.check_data(&mut note);
        ConfigErrors::from_problems(problems)
    }

    /// Whether `checkpoint.storage` can be one, which nobody is asked.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check_storage(&self) -> Result<(), ConfigErrors> {
        let wrong = self.checkpoint.storage.as_deref().and_then(|url| check_storage(url).err());
        ConfigErrors::from_problems(
            wrong.map(|error| Problem::new(format!("checkpoint.{error}"))).into_iter().collect(),
        )
    }

    /// The adapters, and what the groups name: parameters of theirs, which are not known where adapters are refused.
    fn check_trained(&self) -> Result<(), String> {
        let adapters = self.lora.plan(&self.model.config).map_err(|error| LoraSection::problem(&error))?;
        demand(adapters.is_none() || self.param_groups.frozen.is_empty(), || {
            "param-groups.frozen has no meaning with lora.rank: everything but the adapters is frozen; nearest legal: none"
                .into()
        })?;
        let trained = adapters.map_or_else(|| self.model.config.hf_names(), |plan| plan.names(""));
        let groups = self.param_groups.check(trained.iter().map(|(name, _)| name));
        groups.map_err(|error| format!("param-groups.{error}"))
    }

    fn check_ranges(&self, note: &mut impl FnMut(Result<(), String>)) {
        let optimizer = serde_json::to_value(self.optimizer).unwrap_or_default();
        let number = |name: &str| optimizer.get(name).and_then(serde_json::Value::as_f64);
        for key in ["beta1", "beta2", "momentum"] {
            let value = number(key).unwrap_or(0.0);
            in_range(
                note,
                &[(&format!("optimizer.{key}"), value, (0.0..1.0).contains(&value), "at least 0 and below 1")],
            );
        }
        for key in ["eps", "weight-decay", "extra-scale"] {
            let value = number(key).unwrap_or(0.0);
            in_range(note, &[(&format!("optimizer.{key}"), value, value >= 0.0, "at least 0")]);
        }
        self.check_states(note);
        let scale = &self.loss_scale;
        let (first, least) = (scale.initial_scale, scale.min_scale);
        note(demand(first >= least, || {
            format!("loss-scale.initial-scale = {first} is below loss-scale.min-scale = {least}")
        }));
        let (up, down) = (scale.growth_factor, scale.backoff_factor);
        let (sigmas, decay) = (self.anomaly.sigma_factor, self.training.ema_decay.unwrap_or(0.5));
        let minutes = self.training.exit_duration_in_mins.unwrap_or(1.0);
        let (timeout, clip) = (self.training.distributed_timeout_minutes, self.training.clip.unwrap_or(1.0));
        let of_decay = "above 0 and below 1; nearest legal: 0.999";
        in_range(
            note,
            &[
                ("loss-scale.min-scale", least, least > 0.0, "above 0"),
                ("loss-scale.growth-factor", up, up >= 1.0, "at least 1"),
                ("loss-scale.backoff-factor", down, down > 0.0 && down <= 1.0, "above 0 and at most 1"),
                ("anomaly.sigma-factor", sigmas, sigmas > 0.0, "above 0; nearest legal: 6"),
                ("training.ema-decay", decay, decay > 0.0 && decay < 1.0, of_decay),
                ("training.exit-duration-in-mins", minutes, minutes > 0.0, "above 0; nearest legal: none"),
                ("training.distributed-timeout-minutes", timeout, timeout > 0.0, "above 0; nearest legal: 10"),
                ("training.clip", clip, clip > 0.0, "above 0; \"none\" does not clip"),
            ],
        );
        let anomaly = &self.anomaly;
        note(demand(anomaly.spike.is_none() || anomaly.window > 1, || {
            "anomaly.window = 1: one step has no standard deviation, so no spike would be found; nearest legal: 2"
                .into()
        }));
        note(demand(!anomaly.rolls_back() || self.checkpoint.directory.is_some(), || {
            "anomaly: roll-back needs checkpoints, and checkpoint.directory = none; nearest legal: skip".into()
        }));
        note(demand(!anomaly.rolls_back() || self.checkpoint.every != SaveEvery::Never, || {
            "anomaly: roll-back needs checkpoints before the last step, and checkpoint.every = none; nearest legal: auto"
                .into()
        }));
        let (back, every, kept) = (anomaly.roll_back_steps, self.checkpoint.every, self.checkpoint.keep_last);
        note(demand(back == 0 || anomaly.rolls_back(), || {
            format!(
                "anomaly.roll-back-steps = {back}, and no bad step rolls back; nearest legal: 0, or anomaly.non-finite = roll-back"
            )
        }));
        if let (SaveEvery::Steps(every), Some(kept), None) = (every, kept, self.checkpoint.keep_every) {
            let oldest = every.saturating_mul(kept as u64);
            note(demand(back <= oldest, || {
                format!(
                    "anomaly.roll-back-steps = {back}: with checkpoint.every = {every} and checkpoint.keep-last = {kept} no checkpoint is \
                     that old; nearest legal: {oldest}, or checkpoint.keep-last = {}",
                    back.div_ceil(every)
                )
            }));
        }
        let nothing = self.recompute.granularity == Granularity::Selective && self.recompute.modules.is_empty();
        note(demand(!nothing, || {
            "recompute.modules is empty: name core-attention, mlp-activation or norms, or recompute.granularity = none"
                .into()
        }));
        let granularity = self.recompute.granularity;
        note(demand(!self.recompute.cpu_offload || granularity == Granularity::Full, || {
            "recompute.cpu-offload = true needs recomputed layers, whose inputs wait on the host; nearest legal: \
             recompute.granularity = full"
                .into()
        }));
        self.check_counts(note);
        let exits = self.training.exit_duration_in_mins.is_some() || self.training.exit_interval.is_some();
        note(demand(!exits || self.checkpoint.directory.is_some(), || {
            "training.exit-duration-in-mins and training.exit-interval save the run, and checkpoint.directory = none; \
             nearest legal: none of the two"
                .into()
        }));
        let local = self.checkpoint.non_persistent_local_dir.as_deref();
        let demanded = self.checkpoint.non_persistent_every.is_some() && self.checkpoint.directory.is_some();
        note(demand(local.is_none() || demanded, || {
            format!(
                "checkpoint.non-persistent-local-dir = {} is for copies between checkpoints: it needs checkpoint.directory, and \
                 checkpoint.non-persistent-every; nearest legal: none",
                local.unwrap_or(Path::new("")).display()
            )
        }));
        let is_for_restarts = self.training.max_restarts > 0 || local.is_some();
        let copies = self.checkpoint.non_persistent_every.filter(|_| !is_for_restarts);
        note(demand(copies.is_none(), || {
            format!(
                "checkpoint.non-persistent-every = {} copies the state for restarts, and training.max-restarts = 0; nearest legal: \
                 training.max-restarts = 1, or for several processes checkpoint.non-persistent-local-dir = /dev/shm",
                copies.unwrap_or_default()
            )
        }));
        let (least, dp) = (self.training.min_data_parallel.unwrap_or(1), self.parallel.dp);
        note(demand(least <= dp, || {
            format!("training.min-data-parallel = {least} is above parallel.data-parallel = {dp}; nearest legal: {dp}")
        }));
        note(demand(self.training.min_data_parallel.is_none() || self.training.max_restarts > 0, || {
            format!(
                "training.min-data-parallel = {least} is for restarts, and training.max-restarts = 0; nearest legal: \
                 training.max-restarts = 1"
            )
        }));
    }

    /// Tokens are counted in 64 bits, and a sample's position in the order of all samples in 48.
    fn check_counts(&self, note: &mut impl FnMut(Result<(), String>)) {
        let (training, evaluation) = (&self.training, &self.evaluation);
        let most = u64::MAX / (training.global_batch as u64).saturating_mul(training.seq_length as u64).max(1);
        for (key, batches) in [
            ("training.steps", training.steps),
            ("evaluation.batches", evaluation.batches),
            ("evaluation.final-batches", evaluation.final_batches),
        ] {
            note(demand(batches as u64 <= most, || {
                format!("{key} = {batches}: their tokens are more than can be counted; nearest legal: {most}")
            }));
        }
        const SAMPLES: usize = 1 << 48;
        // As many samples as the steps need follow from the steps, which are refused above.
        let follow =
            training.steps as u64 > most && training.steps.saturating_mul(training.global_batch) >= self.data.samples;
        note(demand(self.data.samples <= SAMPLES || follow, || {
            format!(
                "data.samples = {}: more than can be put in order before the first step; nearest legal: {SAMPLES}",
                self.data.samples
            )
        }));
    }
}

/// Notes the keys whose values are out of range: each with its value, whether it is in range, and the range in words.
pub(super) fn in_range(note: &mut impl FnMut(Result<(), String>), values: &[(&str, f64, bool, &str)]) {
    for (key, value, holds, range) in values {
        note(demand(*holds, || format!("{key} = {value} is not {range}")));
    }
}

pub(super) fn demand(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise()) }
}
