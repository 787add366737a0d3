//! What follows from a run's configuration.

use super::post_training::LoraSection;
use super::run::{DataSection, RunConfig};
use crate::batch::BatchSizes;
use crate::data::{Blend, GptDataConfig};
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

    /// The same run with all weights in place of adapters.
    pub(crate) fn without_adapters(&self) -> Self {
        Self { lora: LoraSection::default(), ..self.clone() }
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

impl DataSection {
    /// Keys that are set and need the id of the end-of-document token.
    pub fn needs_end_of_document(&self) -> Vec<&'static str> {
        let keys = [
            ("data.eod-mask-loss", self.eod_mask_loss),
            ("data.reset-attention-mask", self.reset_attention_mask),
            ("data.reset-position-ids", self.reset_position_ids),
        ];
        keys.into_iter().filter(|(_, set)| *set).map(|(key, _)| key).collect()
    }

    /// The prefixes with their weights.
    pub fn blend(&self) -> Blend {
        Blend { prefixes: self.prefixes.clone(), weights: self.weights.clone() }
    }

    /// The samples of `seq_length` tokens, `validation` of them for validation (`None`: all that there are).
    pub fn samples(&self, seq_length: usize, validation: Option<usize>, eod_id: Option<i64>) -> GptDataConfig {
        GptDataConfig {
            seq_length,
            seed: self.seed,
            split: self.split.clone(),
            num_samples: [Some(self.samples), validation, validation],
            eod_mask_loss: eod_id.filter(|_| self.eod_mask_loss),
            eod_documents: eod_id.filter(|_| self.reset_attention_mask || self.reset_position_ids),
            keep_partial_validation: self.keep_partial_validation,
            cache: self.cache.clone(),
        }
    }
}
