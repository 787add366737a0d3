//! The sizes of a Llama. Field names are Hugging Face's.

use backend_dist::shard::Init;
use serde::{Deserialize, Serialize};

use crate::causal_lm::ModelConfig;
use crate::config::{ConfigError, divides, even, positive, share};
use crate::layers::{
    Activation, AttentionConfig, BlockConfig, LinearConfig, Llama3Scaling, MlpConfig, NormKind, RopeConfig,
};
use crate::layout::ModelDims;
use crate::megatron::MegatronDecoder;
use crate::names::NameMap;

/// A Llama's sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LlamaConfig {
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
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Llama 3.1's scaling of the rotary frequencies.
    pub rope_scaling: Option<Llama3Scaling>,
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
            vocab_size: 256,
            hidden_size: 64,
            intermediate_size: 128,
            num_hidden_layers: 2,
            num_attention_heads: 8,
            num_key_value_heads: 4,
            head_dim: 8,
            rope_theta: 10_000.0,
            rope_scaling: None,
            rms_norm_eps: 1e-5,
            tie_word_embeddings: false,
            attention_bias: false,
            mlp_bias: false,
            initializer_range: 0.02,
            hidden_dropout: 0.0,
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
            rope_scaling: Some(Llama3Scaling {
                factor: 32.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 8192,
            }),
            tie_word_embeddings: true,
            ..Self::llama3_8b()
        }
    }

    /// Distribution of embeddings and of projections inside a block.
    pub(super) fn init(&self) -> Init {
        Init::Normal { std: self.initializer_range }
    }

    pub(super) fn rope(&self) -> RopeConfig {
        RopeConfig { head_dim: self.head_dim, theta: self.rope_theta, scaling: self.rope_scaling }
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
                input: linear(self.attention_bias, self.init()),
                output: linear(self.attention_bias, residual),
            },
            mlp: MlpConfig {
                hidden: self.hidden_size,
                intermediate: self.intermediate_size,
                activation: Activation::SwiGlu,
                input: linear(self.mlp_bias, self.init()),
                output: linear(self.mlp_bias, residual),
            },
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
        ])?;
        divides("num_key_value_heads", self.num_key_value_heads, "num_attention_heads", self.num_attention_heads)?;
        even("head_dim", self.head_dim)?;
        share("hidden_dropout", self.hidden_dropout)
    }

    fn dims(&self) -> ModelDims {
        ModelDims {
            heads: self.num_attention_heads,
            kv_heads: self.num_key_value_heads,
            intermediate: self.intermediate_size,
            layers: self.num_hidden_layers,
            max_positions: None,
        }
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn megatron_names(&self) -> NameMap {
        let decoder = MegatronDecoder {
            vocab: self.vocab_size,
            hidden: self.hidden_size,
            intermediate: self.intermediate_size,
            layers: self.num_hidden_layers,
            heads: self.num_attention_heads,
            kv_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            gated: true,
            norm_bias: false,
            qkv_bias: self.attention_bias,
            proj_bias: self.attention_bias,
            mlp_bias: self.mlp_bias,
            positions: None,
            tied: self.tie_word_embeddings,
        };
        decoder.names()
    }

    fn hf_names(&self) -> NameMap {
        super::hf::names(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The model cards' 8.03, 1.24 billion parameters, to the last one (`LlamaForCausalLM.num_parameters()`).
    #[test]
    fn presets_have_the_published_sizes() {
        assert_eq!(LlamaConfig::llama3_8b().parameter_count(), 8_030_261_248);
        assert_eq!(LlamaConfig::llama3_1b().parameter_count(), 1_235_814_400);
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
        assert_eq!(tiny().check(), Ok(()));
    }
}
