//! The sizes of a GPT. Field names are Hugging Face's or Megatron-LM's.

use backend_dist::ops::GeluKind;
use backend_dist::shard::Init;
use serde::{Deserialize, Serialize};

use crate::causal_lm::ModelConfig;
use crate::config::{ConfigError, divides, not_negative, positive, share};
use crate::frame::{DecoderConfig, Frame};
use crate::layers::{
    Activation, AttentionConfig, BlockConfig, Ffn, LinearConfig, Mixer, MlpConfig, NormKind, NormPlacement, Vocab,
};
use crate::layout::ModelDims;
use crate::limits;
use crate::names::NameMap;

/// A GPT's sizes.
///
/// ```
/// use models::{GptConfig, ModelConfig};
///
/// assert_eq!(GptConfig::gpt2().parameter_count(), 124_439_808);
/// let small = GptConfig { num_hidden_layers: 1, ..GptConfig::tiny() };
/// assert!(small.check().is_ok());
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GptConfig {
    /// Number of tokens.
    pub vocab_size: usize,
    /// Longest sequence: number of learned positions.
    pub max_position_embeddings: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Attention heads; they share `hidden_size` evenly.
    pub num_attention_heads: usize,
    /// Epsilon of the norms.
    pub layer_norm_epsilon: f64,
    /// GPT-2's approximation of GELU instead of the exact one.
    pub gelu_tanh: bool,
    /// Linear layers have biases.
    pub bias: bool,
    /// The output layer shares the embedding's weight.
    pub tie_word_embeddings: bool,
    /// Standard deviation of the initial weights; projections onto the residual stream get `std / √(2 layers)`.
    pub initializer_range: f64,
    /// Share of the elements dropped after the embedding and before each residual addition.
    pub hidden_dropout: f64,
    /// Share of the attention weights dropped after the softmax.
    pub attention_dropout: f64,
    /// The size of every rank's shard of the vocabulary is a multiple of this.
    pub make_vocab_size_divisible_by: usize,
}

/// [`GptConfig::tiny`].
impl Default for GptConfig {
    fn default() -> Self {
        Self::tiny()
    }
}

impl GptConfig {
    /// Small enough for tests: 0.1 million parameters.
    pub fn tiny() -> Self {
        Self {
            vocab_size: 256,
            max_position_embeddings: 128,
            hidden_size: 64,
            intermediate_size: 256,
            num_hidden_layers: 2,
            num_attention_heads: 8,
            layer_norm_epsilon: 1e-5,
            gelu_tanh: true,
            bias: true,
            tie_word_embeddings: true,
            initializer_range: 0.02,
            hidden_dropout: 0.0,
            attention_dropout: 0.0,
            make_vocab_size_divisible_by: 1,
        }
    }

    /// GPT-2 with 124 million parameters, without dropout.
    pub fn gpt2() -> Self {
        Self {
            vocab_size: 50_257,
            max_position_embeddings: 1024,
            hidden_size: 768,
            intermediate_size: 3072,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            make_vocab_size_divisible_by: 128,
            ..Self::tiny()
        }
    }

    /// GPT-2 of another size: 355 million parameters (medium), 774 (large), 1,558 (XL).
    fn gpt2_of(hidden_size: usize, num_hidden_layers: usize, num_attention_heads: usize) -> Self {
        let intermediate_size = 4 * hidden_size;
        Self { hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, ..Self::gpt2() }
    }

    /// Features of a head.
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.num_attention_heads.max(1)
    }

    /// Distribution of embeddings and of projections inside a block.
    fn init(&self) -> Init {
        Init::Normal { std: self.initializer_range }
    }
}

impl DecoderConfig for GptConfig {
    fn frame(&self) -> Frame {
        let vocab =
            Vocab { size: self.vocab_size, hidden: self.hidden_size, divisor: self.make_vocab_size_divisible_by };
        Frame {
            positions: Some(self.max_position_embeddings),
            tied: self.tie_word_embeddings,
            norm: NormKind::Layer,
            dropout: self.hidden_dropout,
            ..Frame::new(vocab, self.num_hidden_layers, self.init(), self.layer_norm_epsilon)
        }
    }

    fn block(&self, _layer: usize) -> BlockConfig {
        let residual = Init::Normal { std: self.initializer_range / (2.0 * self.num_hidden_layers as f64).sqrt() };
        let linear = |init| LinearConfig { bias: self.bias, init };
        BlockConfig {
            mixer: Some(Mixer::Attention(AttentionConfig {
                dropout: self.attention_dropout,
                ..AttentionConfig::new(
                    self.hidden_size,
                    [self.num_attention_heads; 2],
                    self.head_dim(),
                    [linear(self.init()), linear(residual)],
                )
            })),
            mlp: Some(Ffn::Dense(MlpConfig {
                hidden: self.hidden_size,
                intermediate: self.intermediate_size,
                activation: Activation::Gelu(if self.gelu_tanh { GeluKind::Tanh } else { GeluKind::Erf }),
                input: linear(self.init()),
                output: linear(residual),
            })),
            norm: NormKind::Layer,
            placement: NormPlacement::Before,
            norm_eps: self.layer_norm_epsilon,
            dropout: self.hidden_dropout,
        }
    }
}

impl ModelConfig for GptConfig {
    fn check(&self) -> Result<(), ConfigError> {
        limits::sizes(self)?;
        let (layers, hidden) = (("num_hidden_layers", self.num_hidden_layers), ("hidden_size", self.hidden_size));
        limits::elements(&[("vocab_size", self.vocab_size), hidden])?;
        limits::elements(&[("max_position_embeddings", self.max_position_embeddings), hidden])?;
        limits::elements(&[layers, hidden, hidden])?;
        limits::elements(&[layers, hidden, ("intermediate_size", self.intermediate_size)])?;
        positive(&[
            ("vocab_size", self.vocab_size),
            ("make_vocab_size_divisible_by", self.make_vocab_size_divisible_by),
            ("max_position_embeddings", self.max_position_embeddings),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
        ])?;
        divides("num_attention_heads", self.num_attention_heads, "hidden_size", self.hidden_size)?;
        let numbers = [("layer_norm_epsilon", self.layer_norm_epsilon), ("initializer_range", self.initializer_range)];
        not_negative(&numbers)?;
        share("hidden_dropout", self.hidden_dropout)?;
        share("attention_dropout", self.attention_dropout)
    }

    fn dims(&self) -> ModelDims {
        ModelDims {
            vocab: self.vocab_size,
            hidden: self.hidden_size,
            heads: self.num_attention_heads,
            kv_heads: self.num_attention_heads,
            intermediate: self.intermediate_size,
            experts: None,
            layers: self.num_hidden_layers,
            max_positions: Some(self.max_position_embeddings),
            states: None,
        }
    }

    fn megatron_names(&self) -> NameMap {
        self.frame().megatron_names(|layer| self.block(layer))
    }

    fn hf_names(&self) -> NameMap {
        self.gpt2_names()
    }

    fn presets() -> Vec<(&'static str, Self)> {
        vec![
            ("gpt-tiny", Self::tiny()),
            ("gpt2", Self::gpt2()),
            ("gpt2-medium", Self::gpt2_of(1024, 24, 16)),
            ("gpt2-large", Self::gpt2_of(1280, 36, 20)),
            ("gpt2-xl", Self::gpt2_of(1600, 48, 25)),
        ]
    }

    fn hf_optional_prefix(&self) -> Option<&'static str> {
        Some("transformer.")
    }

    /// Causal masks.
    fn hf_is_derived(&self, name: &str) -> bool {
        name.starts_with("h.") && [".attn.bias", ".attn.masked_bias"].iter().any(|end| name.ends_with(end))
    }

    fn hf_tied_copy(&self) -> Option<[&'static str; 2]> {
        self.tie_word_embeddings.then_some(["lm_head.weight", "transformer.wte.weight"])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contradictory_sizes_are_refused() {
        let config = GptConfig { num_attention_heads: 7, ..GptConfig::tiny() };
        let message = config.check().unwrap_err().to_string();
        assert_eq!(message, "num_attention_heads = 7 does not divide hidden_size = 64; nearest legal: 4, 8");
        let none = GptConfig { num_attention_heads: 0, ..GptConfig::tiny() };
        assert_eq!(
            (none.head_dim(), none.block(0).attention().map_or(0, |attention| attention.head_dim)),
            (64, 64),
            "it is asked before it is checked"
        );
        let message = none.check().unwrap_err().to_string();
        assert_eq!(message, "num_attention_heads = 0 does not divide hidden_size = 64; nearest legal: 1");
    }
}
