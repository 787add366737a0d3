//! The sizes of a Llama and of its relatives. Field names are Hugging Face's.

use backend_dist::shard::Init;
use serde::{Deserialize, Serialize};

use super::model::Frame;
use super::variant::LlamaVariant;
use crate::causal_lm::ModelConfig;
use crate::config::{ConfigError, divides, even, not_negative, positive, rotary, share};
use crate::layers::{
    Activation, AttentionConfig, BlockConfig, Ffn, LinearConfig, MlpConfig, NormKind, RopeConfig, RopeScaling, Vocab,
};
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
    /// A position sees itself and this many minus one before it (Mistral only); `None` is all of them.
    pub sliding_window: Option<usize>,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Llama 3.1's scaling of the rotary frequencies, or YaRN.
    pub rope_scaling: Option<RopeScaling>,
    /// Epsilon of the norms.
    pub rms_norm_eps: f64,
    /// The output layer shares the embedding's weight.
    pub tie_word_embeddings: bool,
    /// Query, key, value and output projections have biases.
    pub attention_bias: bool,
    /// The MLP's linear layers have biases.
    pub mlp_bias: bool,
    /// Standard deviation of the initial weights; projections onto the residual stream get `std / √(2 layers)`, as in
    /// Megatron-LM.
    pub initializer_range: f64,
    /// Share of the elements dropped after the embedding and before each residual addition.
    pub hidden_dropout: f64,
    /// Share of the attention weights dropped after the softmax.
    pub attention_dropout: f64,
    /// The size of every rank's shard of the vocabulary is a multiple of this.
    pub make_vocab_size_divisible_by: usize,
}

impl LlamaConfig {
    /// Whether every query and key head is normalised.
    pub(super) fn has_head_norms(&self) -> bool {
        self.variant == LlamaVariant::Qwen3
    }

    /// Distribution of embeddings and of projections inside a block.
    pub(crate) fn init(&self) -> Init {
        Init::Normal { std: self.initializer_range }
    }

    /// Distribution of projections onto the residual stream.
    pub(crate) fn residual_init(&self) -> Init {
        Init::Normal { std: self.initializer_range / (2.0 * self.num_hidden_layers as f64).sqrt() }
    }

    pub(crate) fn frame(&self) -> Frame {
        Frame {
            vocab: Vocab {
                size: self.vocab_size,
                hidden: self.hidden_size,
                divisor: self.make_vocab_size_divisible_by,
            },
            layers: self.num_hidden_layers,
            tied: self.tie_word_embeddings,
            init: self.init(),
            rope: RopeConfig { head_dim: self.head_dim, theta: self.rope_theta, scaling: self.rope_scaling },
            norm_eps: self.rms_norm_eps,
            dropout: self.hidden_dropout,
        }
    }

    pub(crate) fn block(&self) -> BlockConfig {
        let residual = self.residual_init();
        let linear = |bias, init| LinearConfig { bias, init };
        BlockConfig {
            attention: AttentionConfig {
                hidden: self.hidden_size,
                heads: self.num_attention_heads,
                kv_heads: self.num_key_value_heads,
                head_dim: self.head_dim,
                window: self.sliding_window,
                dropout: self.attention_dropout,
                head_norm_eps: self.has_head_norms().then_some(self.rms_norm_eps),
                input: linear(self.attention_bias, self.init()),
                output: linear(self.attention_bias, residual),
            },
            mlp: Ffn::Dense(MlpConfig {
                hidden: self.hidden_size,
                intermediate: self.intermediate_size,
                activation: Activation::SwiGlu,
                input: linear(self.mlp_bias, self.init()),
                output: linear(self.mlp_bias, residual),
            }),
            norm: NormKind::Rms,
            norm_eps: self.rms_norm_eps,
            dropout: self.hidden_dropout,
        }
    }
}

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
        if let Some(value) = self.sliding_window.filter(|_| self.variant != LlamaVariant::Mistral) {
            let (owner, variant) = ("models with `variant = \"mistral\"`", self.variant.to_string());
            return Err(ConfigError::Foreign { key: "sliding_window", value, owner, variant });
        }
        divides("num_key_value_heads", self.num_key_value_heads, "num_attention_heads", self.num_attention_heads)?;
        even("head_dim", self.head_dim)?;
        rotary(self.rope_theta, self.rope_scaling)?;
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
        }
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn megatron_names(&self) -> NameMap {
        self.frame().megatron_names(|_| self.block())
    }

    fn hf_names(&self) -> NameMap {
        super::hf::names(self)
    }

    fn presets() -> Vec<(&'static str, Self)> {
        vec![
            ("tiny", Self::tiny()),
            ("llama3-1b", Self::llama3_1b()),
            ("llama3-8b", Self::llama3_8b()),
            ("mistral-7b", Self::mistral_7b()),
            ("qwen3-0.6b", Self::qwen3_0_6b()),
        ]
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
            "sliding_window = 16: models with `variant = \"mistral\"` have it, this model is llama; nearest legal: none"
        );
        let mistral = || LlamaConfig { variant: LlamaVariant::Mistral, ..tiny() };
        assert!(
            refuse(LlamaConfig { sliding_window: Some(0), ..mistral() }).contains("sliding_window = 0 is not positive")
        );
        assert_eq!(LlamaConfig { sliding_window: Some(16), ..mistral() }.check(), Ok(()));
        assert_eq!(tiny().check(), Ok(()));
    }
}
