//! What follows from a run's configuration.

use super::run::RunConfig;
use crate::batch::BatchSizes;
use crate::engine::{DocumentConfig, EngineConfig};

impl RunConfig {
    /// The engine's configuration.
    pub fn engine(&self) -> EngineConfig {
        let training = &self.training;
        EngineConfig {
            optimizer: self.optimizer,
            weight_decay: self.weight_decay,
            pipeline: self.pipeline.clone(),
            recompute: self.recompute.clone(),
            loss_scale: self.loss_scale,
            anomaly: self.anomaly,
            groups: self.param_groups.clone(),
            ema_decay: training.ema_decay,
            layer_norms: self.log.layer_norms,
            num_zeros_in_grad: self.log.num_zeros_in_grad,
            max_attention_logit: self.log.max_attention_logit,
            evaluate_ema: self.evaluation.ema,
            rampup_batch_size: training.rampup_batch_size,
            clip: training.clip,
            loss: training.loss,
            seed: training.seed,
            keep_fp8_weights: self.fp8.keep_weights,
            context: self.context.clone(),
            preference: self.preference.config(),
            grpo: self.grpo.config(),
            distill: self.distill.config(),
            accuracy: self.chat.is_used(),
            deterministic: self.performance.deterministic,
            copy_engines: self.performance.copy_engines,
            documents: DocumentConfig {
                reset_attention_mask: self.data.reset_attention_mask || self.has_conversations(),
                reset_position_ids: self.data.reset_position_ids || self.has_conversations(),
            },
            ..EngineConfig::new(training.micro_batch, training.global_batch, self.lr.clone())
        }
    }

    /// Whether the run trains on conversations, pairs of answers, or prompts.
    pub fn has_conversations(&self) -> bool {
        self.chat.is_used() || self.preference.is_used() || self.grpo.is_used()
    }

    /// Whether the model that the run starts from is needed after its first step too: it is the reference.
    pub fn has_reference(&self) -> bool {
        let of_pairs = self.preference.config().is_some_and(|preference| preference.loss.has_reference());
        of_pairs || self.grpo.config().is_some_and(|grpo| grpo.beta > 0.0)
    }

    /// Whether the weights that a key names are read whenever the run begins, because its checkpoints do not have them:
    /// the base of adapters, a reference model, the adapter that it starts with, a teacher.
    pub(crate) fn reads_again(&self, key: &str) -> bool {
        let has_adapters = self.lora.rank.is_some();
        match key {
            "model.hf" => has_adapters || self.has_reference(),
            // The reference of GRPO has no adapters.
            "lora.adapter" => has_adapters && self.has_reference() && self.preference.is_used(),
            key => key == "distill.teacher",
        }
    }

    /// Sequences of every global batch.
    pub fn batch_sizes(&self) -> BatchSizes {
        BatchSizes { global: self.training.global_batch, ramp: self.training.rampup_batch_size }
    }

    /// Tokens of the whole run.
    pub fn tokens(&self) -> u64 {
        self.batch_sizes().samples(self.training.steps as u64).saturating_mul(self.training.seq_length as u64)
    }

    /// Tokens of one optimizer step, after the ramp of the batch.
    pub fn tokens_per_step(&self) -> usize {
        self.training.global_batch * self.training.seq_length
    }
}
