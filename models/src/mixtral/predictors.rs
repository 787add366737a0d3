//! Modules of multi-token prediction of GLM-4.5 and Qwen3-Next, which transformers leaves out.

use super::config::MixtralConfig;
use super::variant::MixtralVariant;
use crate::config::{ConfigError, expect, not_negative};
use crate::frame::Mtp;

/// DeepSeek-V3's, that of Megatron-LM too.
const WEIGHT: f64 = 0.1;

impl MixtralConfig {
    pub(super) fn predictors(&self) -> Option<Mtp> {
        let (modules, weight) = (self.num_nextn_predict_layers, self.mtp_loss_scaling_factor.unwrap_or(WEIGHT));
        (modules > 0).then(|| Mtp { modules, weight: weight / modules as f64 })
    }

    pub(super) fn check_prediction(&self) -> Result<(), ConfigError> {
        let modules = ("num_nextn_predict_layers", self.num_nextn_predict_layers as f64);
        let several = self.variant != MixtralVariant::Qwen3Next;
        expect(several || modules.1 <= 1.0, modules, "at most 1 in a qwen3_next", 1.0)?;
        not_negative(&[("mtp_loss_scaling_factor", self.mtp_loss_scaling_factor.unwrap_or(WEIGHT))])
    }

    /// Whether a tensor of a file is none of the model: of modules that it does not have, copies of embedding and output layer
    /// in those of GLM-4.5, and tables of frequencies.
    pub(super) fn is_passed_over(&self, name: &str) -> bool {
        let modules = self.num_nextn_predict_layers;
        let layer = || name.strip_prefix("model.layers.")?.split('.').next()?.parse::<usize>().ok();
        let copies = [".embed_tokens.weight", ".shared_head.head.weight"];
        match self.variant {
            MixtralVariant::Qwen3Next => modules == 0 && name.starts_with("mtp."),
            MixtralVariant::Glm4Moe => layer().is_some_and(|layer| {
                let is_copy = layer >= self.num_hidden_layers && copies.iter().any(|end| name.ends_with(end));
                is_copy || layer >= self.num_hidden_layers.saturating_add(modules)
            }),
            _ => name.starts_with("model.") && name.ends_with("rotary_emb.inv_freq"),
        }
    }

    /// With the modules that a file has. A `config.json` of GLM-4.5 has their number whether or not they are there, one of
    /// Qwen3-Next has not.
    pub(super) fn with_predicting(self, has: impl Fn(&str) -> bool) -> Self {
        let first = format!("model.layers.{}.enorm.weight", self.num_hidden_layers);
        let num_nextn_predict_layers = match self.variant {
            MixtralVariant::Qwen3Next => usize::from(has("mtp.fc.weight")),
            _ if has(&first) => self.num_nextn_predict_layers,
            _ => 0,
        };
        Self { num_nextn_predict_layers, ..self }
    }
}
