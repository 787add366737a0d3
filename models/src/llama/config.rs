//! The sizes of a Llama and of its relatives. Field names are Hugging Face's.

use backend_dist::shard::Init;
use serde::{Deserialize, Serialize};

use super::model::Frame;
use super::variant::LlamaVariant;
use crate::causal_lm::ModelConfig;
use crate::config::{ConfigError, divides, even, positive, share};
use crate::layers::{
    Activation, AttentionConfig, BlockConfig, Ffn, LinearConfig, Llama3Scaling, MlpConfig, NormKind, RopeConfig,
    RopeScaling, Vocab,
};
use crate::layout::ModelDims;
use crate::names::NameMap;

/// The sizes of a Llama or one of its relatives.
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
    /// Longest sequence that the model was made for. Rotary positions go on beyond it.
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
    /// Every rank's rows of the vocabulary are a multiple of this.
    pub make_vocab_size_divisible_by: usize,
}

/// [`LlamaConfig::tiny`].
impl Default for LlamaConfig {
    fn default() -> Self {
        Self::tiny()
    }
}

impl LlamaConfig {
    /// Small enough for tests: 0.1 million parameters, every feature of a Llama 3 except the scaling.
    pub fn tiny() -> Self {
        Self {
            variant: LlamaVariant::Llama,
            vocab_size: 256,
            hidden_size: 64,
            intermediate_size: 128,
            num_hidden_layers: 2,
            num_attention_heads: 8,
            num_key_value_heads: 4,
            head_dim: 8,
            max_position_embeddings: 2048,
            sliding_window: None,
            rope_theta: 10_000.0,
            rope_scaling: None,
            rms_norm_eps: 1e-5,
            tie_word_embeddings: false,
            attention_bias: false,
            mlp_bias: false,
            initializer_range: 0.02,
            hidden_dropout: 0.0,
            attention_dropout: 0.0,
            make_vocab_size_divisible_by: 1,
        }
    }

    /// Llama 3 8B.
    pub fn llama3_8b() -> Self {
        Self {
            vocab_size: 128_256,
            hidden_size: 4096,
            intermediate_size: 14_336,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: 8,
            head_dim: 128,
            max_position_embeddings: 8192,
            rope_theta: 500_000.0,
            make_vocab_size_divisible_by: 128,
            ..Self::tiny()
        }
    }

    /// Llama 3.2 1B.
    pub fn llama3_1b() -> Self {
        Self {
            hidden_size: 2048,
            intermediate_size: 8192,
            num_hidden_layers: 16,
            head_dim: 64,
            max_position_embeddings: 131_072,
            rope_scaling: Some(RopeScaling::Llama3(Llama3Scaling {
                factor: 32.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 8192,
            })),
            tie_word_embeddings: true,
            ..Self::llama3_8b()
        }
    }

    /// Llama 3.2 3B.
    pub fn llama3_3b() -> Self {
        Self { hidden_size: 3072, num_hidden_layers: 28, num_attention_heads: 24, head_dim: 128, ..Self::llama3_1b() }
    }

    /// Mistral 7B, version 0.1.
    pub fn mistral_7b() -> Self {
        Self {
            variant: LlamaVariant::Mistral,
            vocab_size: 32_000,
            max_position_embeddings: 32_768,
            sliding_window: Some(4096),
            rope_theta: 10_000.0,
            ..Self::llama3_8b()
        }
    }

    /// Qwen3 with 0.6 billion parameters.
    pub fn qwen3_0_6b() -> Self {
        Self {
            variant: LlamaVariant::Qwen3,
            vocab_size: 151_936,
            hidden_size: 1024,
            intermediate_size: 3072,
            num_hidden_layers: 28,
            num_attention_heads: 16,
            max_position_embeddings: 40_960,
            rope_theta: 1_000_000.0,
            rms_norm_eps: 1e-6,
            tie_word_embeddings: true,
            ..Self::llama3_8b()
        }
    }

    /// Whether every query and key head is normalised.
    pub(super) fn has_head_norms(&self) -> bool {
        self.variant == LlamaVariant::Qwen3
    }

    /// Distribution of embeddings and of projections inside a block.
    fn init(&self) -> Init {
        Init::Normal { std: self.initializer_range }
    }

    pub(super) fn frame(&self) -> Frame {
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

    pub(super) fn block(&self) -> BlockConfig {
        let residual = Init::Normal { std: self.initializer_range / (2.0 * self.num_hidden_layers as f64).sqrt() };
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
        positive(&[
            ("vocab_size", self.vocab_size),
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
        share("hidden_dropout", self.hidden_dropout)?;
        share("attention_dropout", self.attention_dropout)
    }

    fn dims(&self) -> ModelDims {
        ModelDims {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The model cards' 8.03, 1.24, 7.24 and 0.6 billion parameters, to the last one (`num_parameters()`).
    #[test]
    fn presets_have_the_published_sizes() {
        assert_eq!(LlamaConfig::mistral_7b().parameter_count(), 7_241_732_096);
        assert_eq!(LlamaConfig::qwen3_0_6b().parameter_count(), 596_049_920);
        assert_eq!(LlamaConfig::llama3_8b().parameter_count(), 8_030_261_248);
        assert_eq!(LlamaConfig::llama3_1b().parameter_count(), 1_235_814_400);
        assert_eq!(LlamaConfig::llama3_3b().parameter_count(), 3_212_749_824);
    }

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
