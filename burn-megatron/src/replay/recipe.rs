//! The recorded run in our terms: model configuration, optimizer, schedule.

use super::oracle::{OracleModel, OracleTraining};
use crate::engine::EngineConfig;
use crate::lr::LrConfig;
use crate::optim::AdamWConfig;
use models::FamilyConfig;
use models::family::{MegatronExperts, MegatronModel};

/// A recorded run that this version cannot repeat.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum RecipeError {
    /// A feature of the recorded model that ours do not have.
    #[error("the recorded model has {what}, which does not run yet")]
    Unsupported { what: String },
    /// A number is missing in a description.
    #[error("no `{key}` followed by a number in `{text}`")]
    Number { key: &'static str, text: String },
}

/// The `nth` number after the words `key` in a description such as `AdamW lr 1e-2 constant, betas 0.9 0.95`.
pub(super) fn number_after(text: &str, key: &'static str, nth: usize) -> Result<f64, RecipeError> {
    let missing = || RecipeError::Number { key, text: text.into() };
    let rest = text.split_once(key).ok_or_else(missing)?.1;
    let word = rest.split_whitespace().nth(nth).ok_or_else(missing)?;
    word.trim_end_matches(',').parse().map_err(|_| missing())
}

/// Batch sizes, AdamW and a constant rate from the recorded description.
///
/// The descriptions say that one-dimensional parameters are not decayed, but the recorded numbers are those of a run
/// that decays every parameter: without it the loss is off by 5e-5 from step 1 on, with it both runs agree to the last
/// digits. In Megatron-Core the rule is not part of the optimizer; a script has to pass `get_standard_config_overrides`
/// (megatron/core/optimizer/__init__.py).
pub(super) fn engine(training: &OracleTraining) -> Result<EngineConfig, RecipeError> {
    let text = &training.optimizer;
    if !(text.contains("AdamW") && text.contains("constant")) {
        return Err(RecipeError::Unsupported {
            what: format!("another optimizer than AdamW at a constant rate: `{text}`"),
        });
    }
    Ok(EngineConfig {
        optimizer: AdamWConfig {
            beta1: number_after(text, "betas", 0)?,
            beta2: number_after(text, "betas", 1)?,
            eps: number_after(text, "eps", 0)?,
            weight_decay: number_after(text, "weight decay", 0)?,
            decay_vectors: true,
            ..AdamWConfig::default()
        }
        .into(),
        clip: Some(number_after(text, "clip", 0)?),
        ..EngineConfig::new(
            training.micro_batch_size,
            training.global_batch_size,
            LrConfig::constant(number_after(text, "lr", 0)?),
        )
    })
}

/// Our model of the recorded sizes.
///
/// Megatron means gradients over micro-batches; with auxiliary losses that is what is repeated, and without masks the
/// mean over tokens is the same. Fails if the recorded model has something that ours do not have.
pub fn model(model: &OracleModel) -> Result<FamilyConfig, RecipeError> {
    let unsupported = |what: String| Err(RecipeError::Unsupported { what });
    if model.bias {
        return unsupported("biases".into());
    }
    for (text, word) in [(&model.norm, "RMSNorm"), (&model.activation, "SwiGLU"), (&model.position, "rope")] {
        if !text.contains(word) {
            return unsupported(format!("`{text}` instead of {word}"));
        }
    }
    let recorded = MegatronModel {
        vocab_size: model.vocab_size,
        hidden_size: model.hidden_size,
        ffn_hidden_size: model.ffn_hidden_size,
        num_layers: model.num_layers,
        num_attention_heads: model.num_attention_heads,
        num_query_groups: model.num_query_groups,
        rotary_base: number_after(&model.position, "base", 0)?,
        norm_epsilon: number_after(&model.norm, "eps", 0)?,
        tied: model.tie_embeddings,
        experts: (model.experts > 0).then_some(MegatronExperts {
            num_experts: model.experts,
            moe_router_topk: model.moe_topk,
            moe_ffn_hidden_size: model.moe_ffn_hidden_size,
            moe_aux_loss_coeff: model.moe_aux_loss_coeff,
        }),
    };
    FamilyConfig::of_megatron(&recorded).map_or_else(|| unsupported("sizes of no family".into()), Ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str =
        "AdamW lr 1e-2 constant, betas 0.9 0.95, eps 1e-8, weight decay 0.1 (not on 1-D), clip 1.0, fp32";

    #[test]
    fn the_description_is_understood() {
        let training = OracleTraining { global_batch_size: 8, micro_batch_size: 2, optimizer: TEXT.into() };
        let config = engine(&training).unwrap();
        assert_eq!(
            config.optimizer,
            AdamWConfig { weight_decay: 0.1, decay_vectors: true, beta2: 0.95, ..AdamWConfig::default() }.into()
        );
        assert_eq!((config.lr, config.clip), (LrConfig::constant(0.01), Some(1.0)));
        assert_eq!(number_after("RMSNorm eps 1e-05", "eps", 0), Ok(1e-5));
    }

    #[test]
    fn other_descriptions_are_refused() {
        let training =
            |text: &str| OracleTraining { global_batch_size: 8, micro_batch_size: 2, optimizer: text.into() };
        let error = engine(&training(&TEXT.replace("eps 1e-8", ""))).unwrap_err();
        assert!(matches!(error, RecipeError::Number { key: "eps", .. }), "{error}");
        assert!(engine(&training("SGD lr 1e-2 constant")).is_err());
    }
}
