//! The sizes of a Mixtral and of its relatives. Field names are Hugging Face's.

use serde::{Deserialize, Serialize};

use super::variant::MixtralVariant;
use crate::causal_lm::{ModelConfig, UnsharedPrefixes};
use crate::config::{ConfigError, common_divisor, divisors, positive};
use crate::frame::DecoderConfig;
use crate::hf::decoder;
use crate::layers::{BalanceOver, Capacity, Dispatcher, LayerPattern, RopeScaling};
use crate::layout::{ExpertDims, ModelDims, StateDims};
use crate::llama::{LlamaConfig, LlamaVariant};
use crate::names::NameMap;
use crate::{limits, sized};

/// The sizes of a Mixtral or one of its relatives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MixtralConfig {
    /// Which of the relatives.
    pub variant: MixtralVariant,
    /// Number of tokens.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of an expert; in a Qwen3-MoE of the MLPs of layers without experts.
    pub intermediate_size: usize,
    /// Width of an expert where it is not `intermediate_size` (Qwen2-MoE, Qwen3-MoE, GLM-4.5, DeepSeek).
    pub moe_intermediate_size: Option<usize>,
    /// Width of the shared expert (Qwen2-MoE, GLM-4.5 and DeepSeek, which always have one); `None` is `intermediate_size`, in a
    /// GLM-4.5 or DeepSeek that of an expert.
    pub shared_expert_intermediate_size: Option<usize>,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key-value heads.
    pub num_key_value_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Experts of a layer.
    pub num_experts: usize,
    /// Experts that a token uses.
    pub num_experts_per_tok: usize,
    /// The probabilities of a token's experts sum up to one.
    pub norm_topk_prob: bool,
    /// Every this many layers one has experts, the last of them; the others have an MLP (Qwen2-MoE and Qwen3-MoE).
    pub decoder_sparse_step: usize,
    /// Further layers with an MLP (Qwen2-MoE and Qwen3-MoE).
    pub mlp_only_layers: Vec<usize>,
    /// The first layers, which have an MLP in place of experts (GLM-4.5, DeepSeek).
    pub first_k_dense_replace: usize,
    /// Groups of neighbouring experts (GLM-4.5).
    pub n_group: usize,
    /// Groups that a token may use (GLM-4.5).
    pub topk_group: usize,
    /// The factor of the probabilities (GLM-4.5).
    pub routed_scaling_factor: f64,
    /// How much a step moves the bias that experts are chosen by (GLM-4.5; `--moe-router-bias-update-rate`); `None` is
    /// 0.001.
    pub moe_router_bias_update_rate: Option<f64>,
    /// Coefficient of the load-balancing loss of each layer, as Megatron-LM defines it (`--moe-aux-loss-coeff`). That of a
    /// `config.json` of gpt-oss counts where `output_router_logits` is true.
    pub router_aux_loss_coef: f64,
    /// Over which tokens the load is balanced (`--moe-router-load-balancing-type`).
    pub router_balance: BalanceOver,
    /// Coefficient of the z-loss (`--moe-z-loss-coeff`).
    pub router_z_loss_coef: f64,
    /// The most tokens that an expert takes (`--moe-expert-capacity-factor`); without it nothing is dropped.
    pub moe_capacity: Option<Capacity>,
    /// How tokens are dispatched to the ranks of their experts (`--moe-token-dispatcher-type`).
    pub moe_dispatcher: Dispatcher,
    /// Modules of multi-token prediction (`--mtp-num-layers`; GLM-4.5, and one in a Qwen3-Next).
    pub num_nextn_predict_layers: usize,
    /// Weight of the mean of their losses (`--mtp-loss-scaling-factor`); `None` is 0.1.
    pub mtp_loss_scaling_factor: Option<f64>,
    /// A position sees itself and this many minus one before it; `None` is all of them.
    pub sliding_window: Option<usize>,
    /// Layers without the window: the last of every so many (gpt-oss), or a list; `None` is no such layer.
    pub sliding_window_pattern: Option<LayerPattern>,
    /// Bound of an expert's gate, and with either sign of what it multiplies (gpt-oss, which always has one).
    pub swiglu_limit: Option<f64>,
    /// Share of a head's features that are rotated; `None` is 0.25 in a Qwen3-Next, 0.5 in a GLM-4.5.
    pub partial_rotary_factor: Option<f64>,
    /// Layers with attention, the others have Gated DeltaNet (Qwen3-Next): the last of every so many, or a list; `None` is
    /// 4.
    pub full_attention_interval: Option<LayerPattern>,
    /// Heads of queries and keys of Gated DeltaNet; `None` is 16.
    pub linear_num_key_heads: Option<usize>,
    /// Heads of values of Gated DeltaNet; `None` is 32.
    pub linear_num_value_heads: Option<usize>,
    /// Features of a query or key head of Gated DeltaNet; `None` is 128.
    pub linear_key_head_dim: Option<usize>,
    /// Features of a value head of Gated DeltaNet; `None` is 128.
    pub linear_value_head_dim: Option<usize>,
    /// Positions that Gated DeltaNet's convolution sees; `None` is 4.
    pub linear_conv_kernel_dim: Option<usize>,
    /// Longest sequence that the model was made for. Rotary positions continue beyond it.
    pub max_position_embeddings: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Scaling of the rotary frequencies.
    pub rope_scaling: Option<RopeScaling>,
    /// Epsilon of the norms.
    pub rms_norm_eps: f64,
    /// The output layer shares the embedding's weight.
    pub tie_word_embeddings: bool,
    /// Query, key, value and output projections have biases (Qwen3-MoE, gpt-oss, OLMoE, DeepSeek; in a GLM-4.5 without the last).
    pub attention_bias: bool,
    /// Every query and key head is normalised before rotation (GLM-4.5).
    pub use_qk_norm: bool,
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

/// transformers' defaults.
pub(super) const SWIGLU_ALPHA: f64 = 1.702;
pub(super) const SWIGLU_LIMIT: f64 = 7.0;

impl MixtralConfig {
    /// Width of an expert.
    pub fn expert_size(&self) -> usize {
        self.moe_intermediate_size.unwrap_or(self.intermediate_size)
    }

    /// Layers with an MLP instead of experts, in ascending order.
    pub fn dense_layers(&self) -> Vec<usize> {
        (0..self.num_hidden_layers).filter(|layer| self.is_dense(*layer)).collect()
    }

    /// Whether a layer has an MLP: modules of multi-token prediction, which are counted behind the last layer, have experts.
    pub(super) fn is_dense(&self, layer: usize) -> bool {
        let step = self.decoder_sparse_step.max(1);
        let is_listed = layer < self.first_k_dense_replace || self.mlp_only_layers.contains(&layer);
        layer < self.num_hidden_layers && (is_listed || !(layer + 1).is_multiple_of(step))
    }

    /// Width of the shared expert, if there is one.
    pub fn shared_expert(&self) -> Option<usize> {
        let default = match self.variant {
            MixtralVariant::Qwen2Moe | MixtralVariant::Qwen3Next => self.intermediate_size,
            MixtralVariant::Glm4Moe | MixtralVariant::DeepSeek => self.expert_size(),
            MixtralVariant::Mixtral | MixtralVariant::GptOss | MixtralVariant::Qwen3Moe | MixtralVariant::Olmoe => {
                return None;
            }
        };
        Some(self.shared_expert_intermediate_size.unwrap_or(default))
    }

    /// Whether a learned function of the token weighs the shared expert.
    pub fn has_shared_gate(&self) -> bool {
        matches!(self.variant, MixtralVariant::Qwen2Moe | MixtralVariant::Qwen3Next)
    }

    /// Whether the output projection of attention has a bias.
    pub fn has_output_bias(&self) -> bool {
        self.attention_bias && self.variant != MixtralVariant::Glm4Moe
    }

    /// Whether every query and key head is normalised.
    pub fn has_head_norms(&self) -> bool {
        self.use_qk_norm || matches!(self.variant, MixtralVariant::Qwen3Moe | MixtralVariant::Qwen3Next)
    }

    /// The Llama that this is but for its experts.
    pub(super) fn llama(&self) -> LlamaConfig {
        let variant = match self.variant {
            MixtralVariant::Qwen2Moe => LlamaVariant::Qwen2,
            _ if self.has_head_norms() => LlamaVariant::Qwen3,
            _ => LlamaVariant::Llama,
        };
        sized! { LlamaConfig::tiny();
            variant: variant,
            vocab_size: self.vocab_size, hidden_size: self.hidden_size, intermediate_size: self.intermediate_size,
            num_hidden_layers: self.num_hidden_layers, num_attention_heads: self.num_attention_heads,
            num_key_value_heads: self.num_key_value_heads, head_dim: self.head_dim,
            max_position_embeddings: self.max_position_embeddings, rope_theta: self.rope_theta,
            rope_scaling: self.rope_scaling, partial_rotary_factor: self.rotated_share(),
            rms_norm_eps: self.rms_norm_eps, tie_word_embeddings: self.tie_word_embeddings,
            attention_bias: self.attention_bias, mlp_bias: false, initializer_range: self.initializer_range,
            hidden_dropout: self.hidden_dropout, attention_dropout: self.attention_dropout,
            make_vocab_size_divisible_by: self.make_vocab_size_divisible_by
        }
    }
}

impl ModelConfig for MixtralConfig {
    fn check(&self) -> Result<(), ConfigError> {
        limits::sizes(self)?;
        let layers = self.num_hidden_layers.saturating_add(self.num_nextn_predict_layers);
        let experts = [("num_hidden_layers", layers), ("num_experts", self.num_experts)];
        let width = [("hidden_size", self.hidden_size), ("moe_intermediate_size", self.expert_size())];
        limits::experts(&experts)?;
        limits::elements(&[experts, width].concat())?;
        positive(&[
            ("decoder_sparse_step", self.decoder_sparse_step),
            ("sliding_window", self.sliding_window.unwrap_or(1)),
        ])?;
        for (key, pattern) in [
            ("sliding_window_pattern", &self.sliding_window_pattern),
            ("full_attention_interval", &self.full_attention_interval),
        ] {
            LayerPattern::check(pattern.as_ref(), key, self.num_hidden_layers)?;
        }
        divisors(&[("swiglu_limit", self.swiglu_limit)])?;
        self.check_variant()?;
        LlamaConfig { partial_rotary_factor: None, ..self.llama() }.check()?;
        self.llama().check_rotated()?;
        self.check_linear()?;
        self.check_routing()?;
        self.check_prediction()?;
        self.experts().check()
    }

    fn dims(&self) -> ModelDims {
        // Ranks divide the MLPs of layers without experts and the shared experts.
        let mlp = if self.dense_layers().is_empty() { 0 } else { self.intermediate_size };
        ModelDims {
            intermediate: common_divisor(mlp, self.shared_expert().unwrap_or(0)),
            experts: Some(ExpertDims { count: self.num_experts, intermediate: self.expert_size() }),
            states: self.linear_layers().first().map(|_| {
                let linear = self.linear_attention();
                StateDims::linear(linear.key_heads, linear.value_heads)
            }),
            ..self.llama().dims()
        }
    }

    fn cached_positions(&self) -> Option<usize> {
        self.llama().cached_positions()
    }

    fn unshared_prefixes(&self) -> Option<UnsharedPrefixes> {
        let states = (!self.linear_layers().is_empty()).then_some(UnsharedPrefixes::States);
        states.or(self.moe_capacity.map(|_| UnsharedPrefixes::Capacity))
    }

    /// Of sizes that nobody has checked too: [`dims`](ModelConfig::dims) goes through all layers.
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn megatron_names(&self) -> NameMap {
        self.frame().megatron_names(|layer| self.block(layer))
    }

    fn hf_names(&self) -> NameMap {
        decoder::names(&self.frame(), |layer| self.block(layer), self.tensor_names())
    }

    fn presets() -> Vec<(&'static str, Self)> {
        Self::by_name()
    }

    fn hf_is_derived(&self, name: &str) -> bool {
        self.is_passed_over(name)
    }

    fn hf_present(self, has: impl Fn(&str) -> bool) -> Self {
        self.with_predicting(has)
    }

    fn hf_tied_copy(&self) -> Option<[&'static str; 2]> {
        self.tie_word_embeddings.then_some(["lm_head.weight", "model.embed_tokens.weight"])
    }
}

#[cfg(test)]
mod tests;
