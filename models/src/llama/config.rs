//! The sizes of a Llama and of its relatives. Field names are Hugging Face's.

use serde::{Deserialize, Serialize};

use super::variant::LlamaVariant;
use crate::causal_lm::ModelConfig;
use crate::config::{ConfigError, base, divides, divisors, even, expect, not_negative, positive, rotary, share};
use crate::frame::DecoderConfig;
use crate::hf::{decoder, keys};
use crate::layers::{DynamicScaling, LayerPattern, RopeScaling};
use crate::layout::ModelDims;
use crate::limits;
use crate::names::NameMap;

/// The sizes of a Llama or one of its relatives.
///
/// ```
/// use models::{LlamaConfig, ModelConfig};
///
/// let config = LlamaConfig { num_key_value_heads: 3, ..LlamaConfig::tiny() };
/// let refused = config.check().unwrap_err().to_string();
/// assert_eq!(refused, "num_key_value_heads = 3 does not divide num_attention_heads = 8; nearest legal: 2, 4");
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LlamaConfig {
    /// Which of the relatives.
    pub variant: LlamaVariant,
    /// Number of tokens.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key-value heads.
    pub num_key_value_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Longest sequence that the model was made for. Rotary positions continue beyond it.
    pub max_position_embeddings: usize,
    /// A position sees itself and this many minus one before it (Mistral, Gemma, Phi-3); `None` is all of them.
    pub sliding_window: Option<usize>,
    /// Layers without the window: the last of every so many (Gemma), or a list; `None` is no such layer.
    pub sliding_window_pattern: Option<LayerPattern>,
    /// Layers that do not rotate queries and keys: the last of every so many (SmolLM3), or a list.
    pub no_rope_layer_interval: Option<LayerPattern>,
    /// Share of a head's features that are rotated, the first ones (Phi-3, GLM-4).
    pub partial_rotary_factor: Option<f64>,
    /// Base of the rotary frequencies of layers with a window, which have no scaling (Gemma 3, OLMo 3); `None` is the same base, in
    /// Gemma 3 with the scaling.
    pub rope_local_base_freq: Option<f64>,
    /// Scores are divided by the root of this (Gemma 2 and 3); `None` is by that of `head_dim`.
    pub query_pre_attn_scalar: Option<f64>,
    /// A score `s` becomes `c tanh(s/c)` before the softmax (Gemma 2).
    pub attn_logit_softcapping: Option<f64>,
    /// A logit `z` becomes `c tanh(z/c)` (Gemma 2).
    pub final_logit_softcapping: Option<f64>,
    /// Embeddings are multiplied with this (Granite).
    pub embedding_multiplier: Option<f64>,
    /// Scores are multiplied with this (Granite); `None` is the reciprocal root of `head_dim`.
    pub attention_multiplier: Option<f64>,
    /// What attention and MLP add to the residual stream is multiplied with this (Granite).
    pub residual_multiplier: Option<f64>,
    /// Logits are divided by this (Granite).
    pub logits_scaling: Option<f64>,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Llama 3.1's scaling of the rotary frequencies, or YaRN.
    pub rope_scaling: Option<RopeScaling>,
    /// Epsilon of the norms.
    pub rms_norm_eps: f64,
    /// The output layer shares the embedding's weight.
    pub tie_word_embeddings: bool,
    /// Query, key and value projections have biases, and in most relatives the output projection. Qwen2's always have.
    pub attention_bias: bool,
    /// The MLP's linear layers have biases.
    pub mlp_bias: bool,
    /// Standard deviation of the initial weights; projections onto the residual stream get `std / √(2 layers)`, as in
    /// Megatron-LM.
    pub initializer_range: f64,
    /// Share of the elements dropped after the embedding, but for Seed-OSS, and before each residual addition.
    pub hidden_dropout: f64,
    /// Share of the attention weights dropped after the softmax.
    pub attention_dropout: f64,
    /// The size of every rank's shard of the vocabulary is a multiple of this.
    pub make_vocab_size_divisible_by: usize,
}

impl LlamaConfig {
    /// Keys that only some relatives have are set in these alone.
    fn check_owned(&self) -> Result<(), ConfigError> {
        let fields = serde_json::to_value(self).unwrap_or_default();
        let foreign = |key: &&&'static str| !self.variant.has(key) && !fields[**key].is_null();
        match OWNED.iter().find(foreign) {
            None => Ok(()),
            Some(key) => {
                let (value, owner) = (fields[*key].to_string(), LlamaVariant::owners(key));
                Err(ConfigError::Foreign { key, value, owner, variant: self.variant.to_string() })
            }
        }
    }

    /// Some features of a head are rotated, in pairs.
    pub(crate) fn check_rotated(&self) -> Result<(), ConfigError> {
        let share = self.partial_rotary_factor.unwrap_or(1.0);
        let given = ("partial_rotary_factor", share);
        expect(share > 0.0 && share <= 1.0, given, "above 0 and at most 1", 1.0)?;
        let (rotated, pairs) = (self.rotated(), self.head_dim / 2);
        let nearest = (rotated / 2 + 1).min(pairs) as f64 / pairs as f64;
        expect(rotated > 0 && rotated.is_multiple_of(2), given, "an even number of head_dim", nearest)
    }
}

/// Keys that not all relatives have, and that change nothing where they are not set.
pub(super) const OWNED: [&str; 12] = keys![
    "sliding_window" "sliding_window_pattern" "no_rope_layer_interval" "partial_rotary_factor" "rope_local_base_freq"
    "query_pre_attn_scalar" "attn_logit_softcapping" "final_logit_softcapping" "embedding_multiplier"
    "attention_multiplier" "residual_multiplier" "logits_scaling"
];

impl ModelConfig for LlamaConfig {
    fn check(&self) -> Result<(), ConfigError> {
        limits::sizes(self)?;
        let (layers, hidden) = (("num_hidden_layers", self.num_hidden_layers), ("hidden_size", self.hidden_size));
        let heads = self.num_attention_heads.max(self.num_key_value_heads);
        limits::elements(&[("vocab_size", self.vocab_size), hidden])?;
        limits::elements(&[layers, hidden, ("intermediate_size", self.intermediate_size)])?;
        limits::elements(&[layers, hidden, ("num_attention_heads", heads), ("head_dim", self.head_dim)])?;
        positive(&[
            ("vocab_size", self.vocab_size),
            ("make_vocab_size_divisible_by", self.make_vocab_size_divisible_by),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("max_position_embeddings", self.max_position_embeddings),
            ("sliding_window", self.sliding_window.unwrap_or(1)),
        ])?;
        for (key, pattern) in [
            ("sliding_window_pattern", &self.sliding_window_pattern),
            ("no_rope_layer_interval", &self.no_rope_layer_interval),
        ] {
            LayerPattern::check(pattern.as_ref(), key, self.num_hidden_layers)?;
        }
        self.check_owned()?;
        divides("num_key_value_heads", self.num_key_value_heads, "num_attention_heads", self.num_attention_heads)?;
        even("head_dim", self.head_dim)?;
        self.check_rotated()?;
        rotary(self.rope_theta, self.rope_scaling, self.rotated())?;
        if let Some(RopeScaling::Dynamic(DynamicScaling { original_max_position_embeddings: original, .. })) =
            self.rope_scaling
        {
            let (given, most) =
                (("rope_scaling.original_max_position_embeddings", original as f64), self.max_position_embeddings);
            expect(original == most, given, "max_position_embeddings", most as f64)?;
        }
        base("rope_local_base_freq", self.rope_local_base_freq.unwrap_or(1.0))?;
        divisors(&[
            ("query_pre_attn_scalar", self.query_pre_attn_scalar),
            ("attn_logit_softcapping", self.attn_logit_softcapping),
            ("final_logit_softcapping", self.final_logit_softcapping),
            ("embedding_multiplier", self.embedding_multiplier),
            ("attention_multiplier", self.attention_multiplier),
            ("residual_multiplier", self.residual_multiplier),
            ("logits_scaling", self.logits_scaling),
        ])?;
        not_negative(&[("rms_norm_eps", self.rms_norm_eps), ("initializer_range", self.initializer_range)])?;
        share("hidden_dropout", self.hidden_dropout)?;
        share("attention_dropout", self.attention_dropout)
    }

    fn dims(&self) -> ModelDims {
        ModelDims {
            vocab: self.vocab_size,
            hidden: self.hidden_size,
            heads: self.num_attention_heads,
            kv_heads: self.num_key_value_heads,
            intermediate: self.intermediate_size,
            experts: None,
            layers: self.num_hidden_layers,
            max_positions: None,
            states: None,
        }
    }

    fn cached_positions(&self) -> Option<usize> {
        self.rope_scaling.and_then(|scaling| scaling.cached_positions())
    }

    fn megatron_names(&self) -> NameMap {
        self.frame().megatron_names(|layer| self.block(layer))
    }

    fn hf_names(&self) -> NameMap {
        decoder::names(&self.frame(), |layer| self.block(layer), self.variant.architecture().names)
    }

    fn presets() -> Vec<(&'static str, Self)> {
        Self::by_name()
    }

    fn hf_tied_copy(&self) -> Option<[&'static str; 2]> {
        self.tie_word_embeddings.then_some(["lm_head.weight", "model.embed_tokens.weight"])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contradictory_sizes_are_refused() {
        let refuse = |config: LlamaConfig| config.check().unwrap_err().to_string();
        let tiny = LlamaConfig::tiny;
        assert_eq!(
            refuse(LlamaConfig { num_key_value_heads: 3, ..tiny() }),
            "num_key_value_heads = 3 does not divide num_attention_heads = 8; nearest legal: 2, 4"
        );
        assert_eq!(
            refuse(LlamaConfig { head_dim: 7, ..tiny() }),
            "head_dim = 7 is not even and positive; nearest legal: 8"
        );
        assert_eq!(refuse(LlamaConfig { vocab_size: 0, ..tiny() }), "vocab_size = 0 is not positive; nearest legal: 1");
        assert_eq!(
            refuse(LlamaConfig { make_vocab_size_divisible_by: 0, ..tiny() }),
            "make_vocab_size_divisible_by = 0 is not positive; nearest legal: 1"
        );
        assert!(refuse(LlamaConfig { rope_theta: 0.0, ..tiny() }).starts_with("rope_theta = 0 is not at least 1"));
        assert!(refuse(LlamaConfig { rms_norm_eps: -1e-6, ..tiny() }).starts_with("rms_norm_eps = -0.000001 is not"));
        assert!(refuse(LlamaConfig { initializer_range: f64::NAN, ..tiny() }).contains("nearest legal: 0"));
        assert!(refuse(LlamaConfig { hidden_dropout: 1.0, ..tiny() }).contains("hidden_dropout = 1"));
        assert_eq!(
            refuse(LlamaConfig { sliding_window: Some(16), ..tiny() }),
            "sliding_window = 16: mistral, qwen2, qwen3, smollm3, olmo3, gemma2, gemma3_text and phi3 have it, this model is llama; nearest legal: none"
        );
        let mistral = || LlamaConfig { variant: LlamaVariant::Mistral, ..tiny() };
        assert!(
            refuse(LlamaConfig { sliding_window: Some(0), ..mistral() }).contains("sliding_window = 0 is not positive")
        );
        assert_eq!(LlamaConfig { sliding_window: Some(16), ..mistral() }.check(), Ok(()));
        assert_eq!(tiny().check(), Ok(()));
    }
}
