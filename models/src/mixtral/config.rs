//! The sizes of a Mixtral and of its relatives. Field names are Hugging Face's.

use backend_dist::shard::Init;
use serde::{Deserialize, Serialize};

use super::variant::MixtralVariant;
use crate::causal_lm::ModelConfig;
use crate::config::{ConfigError, divides, even, positive, share};
use crate::layers::{
    Activation, AttentionConfig, Balance, BalanceOver, BlockConfig, Capacity, Dispatcher, Ffn, LinearConfig, MlpConfig,
    MoeConfig, NormKind, RopeConfig, RopeScaling, RouterConfig, Scores, Vocab,
};
use crate::layout::{ExpertDims, ModelDims};
use crate::llama::Frame;
use crate::names::NameMap;

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
    /// Width of an expert where it is not `intermediate_size` (Qwen3-MoE only).
    pub moe_intermediate_size: Option<usize>,
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
    /// Every this many layers one has experts, the last of them; the others have an MLP (Qwen3-MoE only).
    pub decoder_sparse_step: usize,
    /// Further layers with an MLP (Qwen3-MoE only).
    pub mlp_only_layers: Vec<usize>,
    /// Coefficient of the load-balancing loss of each layer, as Megatron-LM defines it (`--moe-aux-loss-coeff`).
    pub router_aux_loss_coef: f64,
    /// Over which tokens the load is balanced (`--moe-router-load-balancing-type`).
    pub router_balance: BalanceOver,
    /// Coefficient of the z-loss (`--moe-z-loss-coeff`).
    pub router_z_loss_coef: f64,
    /// The most tokens that an expert takes (`--moe-expert-capacity-factor`); without it nothing is dropped.
    pub moe_capacity: Option<Capacity>,
    /// How tokens come to the ranks of their experts (`--moe-token-dispatcher-type`).
    pub moe_dispatcher: Dispatcher,
    /// Longest sequence that the model was made for. Rotary positions go on beyond it.
    pub max_position_embeddings: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Llama 3.1's scaling of the rotary frequencies, or YaRN.
    pub rope_scaling: Option<RopeScaling>,
    /// Epsilon of the norms.
    pub rms_norm_eps: f64,
    /// The output layer shares the embedding's weight.
    pub tie_word_embeddings: bool,
    /// Query, key, value and output projections have biases (Qwen3-MoE only).
    pub attention_bias: bool,
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

/// [`MixtralConfig::tiny`].
impl Default for MixtralConfig {
    fn default() -> Self {
        Self::tiny()
    }
}

impl MixtralConfig {
    /// Small enough for tests: 0.2 million parameters, four experts of which a token uses two.
    pub fn tiny() -> Self {
        Self {
            variant: MixtralVariant::Mixtral,
            vocab_size: 256,
            hidden_size: 64,
            intermediate_size: 64,
            moe_intermediate_size: None,
            num_hidden_layers: 2,
            num_attention_heads: 8,
            num_key_value_heads: 4,
            head_dim: 8,
            num_experts: 4,
            num_experts_per_tok: 2,
            norm_topk_prob: true,
            decoder_sparse_step: 1,
            mlp_only_layers: Vec::new(),
            router_aux_loss_coef: 0.01,
            router_balance: BalanceOver::MicroBatch,
            router_z_loss_coef: 0.0,
            moe_capacity: None,
            moe_dispatcher: Dispatcher::AllToAll,
            max_position_embeddings: 2048,
            rope_theta: 10_000.0,
            rope_scaling: None,
            rms_norm_eps: 1e-5,
            tie_word_embeddings: false,
            attention_bias: false,
            initializer_range: 0.02,
            hidden_dropout: 0.0,
            attention_dropout: 0.0,
            make_vocab_size_divisible_by: 1,
        }
    }

    /// Mixtral 8x7B, version 0.1.
    pub fn mixtral_8x7b() -> Self {
        Self {
            vocab_size: 32_000,
            hidden_size: 4096,
            intermediate_size: 14_336,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: 8,
            head_dim: 128,
            num_experts: 8,
            router_aux_loss_coef: 0.02,
            max_position_embeddings: 32_768,
            rope_theta: 1_000_000.0,
            make_vocab_size_divisible_by: 128,
            ..Self::tiny()
        }
    }

    /// Mixtral 8x7B cut down to 23.5 of 46.7 billion parameters, which eight GPUs of 141 GB can train with AdamW: half the
    /// layers.
    pub fn mixtral_8x7b_half() -> Self {
        Self { num_hidden_layers: 16, ..Self::mixtral_8x7b() }
    }

    /// Qwen3 with 30 billion parameters, of which a token uses 3 billion.
    pub fn qwen3_30b_a3b() -> Self {
        Self {
            variant: MixtralVariant::Qwen3Moe,
            vocab_size: 151_936,
            hidden_size: 2048,
            intermediate_size: 6144,
            moe_intermediate_size: Some(768),
            num_hidden_layers: 48,
            num_key_value_heads: 4,
            num_experts: 128,
            num_experts_per_tok: 8,
            router_aux_loss_coef: 0.001,
            max_position_embeddings: 40_960,
            rms_norm_eps: 1e-6,
            ..Self::mixtral_8x7b()
        }
    }

    /// Width of an expert.
    pub fn expert_size(&self) -> usize {
        self.moe_intermediate_size.unwrap_or(self.intermediate_size)
    }

    /// Layers with an MLP instead of experts, in ascending order.
    pub fn dense_layers(&self) -> Vec<usize> {
        (0..self.num_hidden_layers).filter(|layer| self.is_dense(*layer)).collect()
    }

    fn is_dense(&self, layer: usize) -> bool {
        self.mlp_only_layers.contains(&layer) || !(layer + 1).is_multiple_of(self.decoder_sparse_step.max(1))
    }

    /// Parameters that a token uses: all but those of the experts that it does not.
    pub fn active_parameter_count(&self) -> usize {
        let moe_layers = self.num_hidden_layers - self.dense_layers().len();
        let unused = self.num_experts - self.num_experts_per_tok;
        self.parameter_count() - moe_layers * unused * 3 * self.hidden_size * self.expert_size()
    }

    /// Whether every query and key head is normalised.
    pub fn has_head_norms(&self) -> bool {
        self.variant == MixtralVariant::Qwen3Moe
    }

    /// Distribution of embeddings and of projections inside a block.
    fn init(&self) -> Init {
        Init::Normal { std: self.initializer_range }
    }

    /// Distribution of projections onto the residual stream.
    fn residual_init(&self) -> Init {
        Init::Normal { std: self.initializer_range / (2.0 * self.num_hidden_layers as f64).sqrt() }
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

    pub(super) fn block(&self, layer: usize) -> BlockConfig {
        let linear = |bias, init| LinearConfig { bias, init };
        let (input, output) = (self.init(), self.residual_init());
        BlockConfig {
            attention: AttentionConfig {
                hidden: self.hidden_size,
                heads: self.num_attention_heads,
                kv_heads: self.num_key_value_heads,
                head_dim: self.head_dim,
                window: None,
                dropout: self.attention_dropout,
                head_norm_eps: self.has_head_norms().then_some(self.rms_norm_eps),
                input: linear(self.attention_bias, input),
                output: linear(self.attention_bias, output),
            },
            mlp: match self.is_dense(layer) {
                true => Ffn::Dense(MlpConfig {
                    hidden: self.hidden_size,
                    intermediate: self.intermediate_size,
                    activation: Activation::SwiGlu,
                    input: linear(false, input),
                    output: linear(false, output),
                }),
                false => Ffn::Moe(self.experts()),
            },
            norm: NormKind::Rms,
            norm_eps: self.rms_norm_eps,
            dropout: self.hidden_dropout,
        }
    }

    fn experts(&self) -> MoeConfig {
        let balance = Balance { over: self.router_balance, coefficient: self.router_aux_loss_coef };
        MoeConfig {
            hidden: self.hidden_size,
            intermediate: self.expert_size(),
            experts: self.num_experts,
            router: RouterConfig {
                scores: if self.norm_topk_prob { Scores::NormalisedSoftmax } else { Scores::SoftmaxBeforeTopK },
                balance: (self.router_aux_loss_coef != 0.0).then_some(balance),
                z_loss: self.router_z_loss_coef,
                ..RouterConfig::new(self.num_experts_per_tok)
            },
            capacity: self.moe_capacity,
            dispatcher: self.moe_dispatcher,
            shared: None,
            input: self.init(),
            output: self.residual_init(),
        }
    }

    /// Keys that only a Qwen3-MoE has.
    fn check_variant(&self) -> Result<(), ConfigError> {
        let foreign = [
            ("moe_intermediate_size", self.moe_intermediate_size),
            ("decoder_sparse_step", Some(self.decoder_sparse_step).filter(|step| *step != 1)),
            ("mlp_only_layers", self.mlp_only_layers.first().copied()),
            ("attention_bias", self.attention_bias.then_some(1)),
            ("norm_topk_prob", (!self.norm_topk_prob).then_some(0)),
        ];
        let given = foreign.into_iter().find_map(|(key, value)| Some((key, value?)));
        match given.filter(|_| self.variant == MixtralVariant::Mixtral) {
            None => Ok(()),
            Some((key, value)) => {
                let (owner, variant) = ("models with `variant = \"qwen3_moe\"`", self.variant.to_string());
                Err(ConfigError::Foreign { key, value, owner, variant })
            }
        }
    }
}

impl ModelConfig for MixtralConfig {
    fn check(&self) -> Result<(), ConfigError> {
        positive(&[
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("decoder_sparse_step", self.decoder_sparse_step),
            ("max_position_embeddings", self.max_position_embeddings),
        ])?;
        self.check_variant()?;
        self.experts().check()?;
        divides("num_key_value_heads", self.num_key_value_heads, "num_attention_heads", self.num_attention_heads)?;
        even("head_dim", self.head_dim)?;
        share("hidden_dropout", self.hidden_dropout)?;
        share("attention_dropout", self.attention_dropout)
    }

    fn dims(&self) -> ModelDims {
        let has_mlp = !self.dense_layers().is_empty();
        ModelDims {
            hidden: self.hidden_size,
            heads: self.num_attention_heads,
            kv_heads: self.num_key_value_heads,
            intermediate: if has_mlp { self.intermediate_size } else { 0 },
            experts: Some(ExpertDims { count: self.num_experts, intermediate: self.expert_size() }),
            layers: self.num_hidden_layers,
            max_positions: None,
        }
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn megatron_names(&self) -> NameMap {
        self.frame().megatron_names(|layer| self.block(layer))
    }

    fn hf_names(&self) -> NameMap {
        super::hf::names(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The model cards' 46.7 and 12.9, and 30.5 and 3.3 billion parameters.
    #[test]
    fn presets_have_the_published_sizes() {
        let counts = |config: MixtralConfig| (config.parameter_count(), config.active_parameter_count());
        assert_eq!(counts(MixtralConfig::mixtral_8x7b()), (46_702_792_704, 12_879_925_248));
        assert_eq!(counts(MixtralConfig::qwen3_30b_a3b()), (30_532_122_624, 3_353_032_704));
        assert_eq!(MixtralConfig::mixtral_8x7b_half().parameter_count() / 10_000_000, 2348);
    }

    #[test]
    fn layers_without_experts() {
        let qwen = MixtralConfig { num_hidden_layers: 6, ..MixtralConfig::qwen3_30b_a3b() };
        assert!(qwen.dense_layers().is_empty());
        let mixed = MixtralConfig { decoder_sparse_step: 2, mlp_only_layers: vec![3], ..qwen };
        assert_eq!(mixed.dense_layers(), [0, 2, 3, 4]);
        assert_eq!((mixed.dims().intermediate, qwen.dims().intermediate), (6144, 0));
    }

    #[test]
    fn contradictory_sizes_are_refused() {
        let refuse = |config: MixtralConfig| config.check().unwrap_err().to_string();
        let tiny = MixtralConfig::tiny;
        assert_eq!(
            refuse(MixtralConfig { num_experts_per_tok: 5, ..tiny() }),
            "num_experts_per_tok = 5 is not at most num_experts; nearest legal: 4"
        );
        assert_eq!(
            refuse(MixtralConfig { mlp_only_layers: vec![1], ..tiny() }),
            "mlp_only_layers = 1: models with `variant = \"qwen3_moe\"` have it, this model is mixtral; nearest legal: none"
        );
        assert!(refuse(MixtralConfig { num_key_value_heads: 3, ..tiny() }).contains("nearest legal: 2, 4"));
        assert!(refuse(MixtralConfig { num_experts: 0, ..tiny() }).contains("num_experts = 0 is not positive"));
        assert_eq!(tiny().check(), Ok(()));
        assert_eq!(MixtralConfig::qwen3_30b_a3b().check(), Ok(()));
    }
}
