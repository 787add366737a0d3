//! The sizes of a DeepSeek-V3 or V2. Field names are Hugging Face's, or Megatron-LM's where Hugging Face has none.

use backend_dist::shard::Init;
use serde::{Deserialize, Serialize};

use super::variant::DeepSeekVariant;
use crate::causal_lm::{ModelConfig, UnsharedPrefixes};
use crate::config::{ConfigError, common_divisor, even, expect, factors, not_negative, positive, rotary};
use crate::frame::DecoderConfig;
use crate::layers::{BalanceOver, Capacity, Dispatcher, RopeScaling, YarnScaling};
use crate::layout::{ExpertDims, ModelDims};
use crate::limits;
use crate::names::NameMap;

/// The sizes of a DeepSeek-V3 or V2.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DeepSeekV3Config {
    /// Which of them.
    pub variant: DeepSeekVariant,
    /// Number of tokens.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLPs of the first layers.
    pub intermediate_size: usize,
    /// Width of an expert.
    pub moe_intermediate_size: usize,
    /// Number of blocks, those of multi-token prediction not counted.
    pub num_hidden_layers: usize,
    /// The first layers, which have an MLP in place of experts.
    pub first_k_dense_replace: usize,
    /// Heads.
    pub num_attention_heads: usize,
    /// Features of the queries' latent; `None`: queries come from the hidden states.
    pub q_lora_rank: Option<usize>,
    /// Features of the latent of keys and values.
    pub kv_lora_rank: usize,
    /// Features of a query and key head that are not rotated.
    pub qk_nope_head_dim: usize,
    /// Features of a query and key head that are rotated.
    pub qk_rope_head_dim: usize,
    /// Features of a value head.
    pub v_head_dim: usize,
    /// Routed experts of a layer.
    pub n_routed_experts: usize,
    /// Shared experts, which all tokens use: one MLP of so many times an expert's width.
    pub n_shared_experts: usize,
    /// Experts that a token uses.
    pub num_experts_per_tok: usize,
    /// Groups of neighbouring experts.
    pub n_group: usize,
    /// Groups that a token may use.
    pub topk_group: usize,
    /// The scores of a token's experts are brought to a sum of one.
    pub norm_topk_prob: bool,
    /// The factor of the scores.
    pub routed_scaling_factor: f64,
    /// How much a step moves the bias that experts are chosen by (`--moe-router-bias-update-rate`); DeepSeek-V2 has no bias.
    pub moe_router_bias_update_rate: f64,
    /// Coefficient of the load-balancing loss of each layer (`--moe-aux-loss-coeff`).
    pub router_aux_loss_coef: f64,
    /// Over which tokens the load is balanced (`--moe-router-load-balancing-type`).
    pub router_balance: BalanceOver,
    /// The most tokens that an expert takes (`--moe-expert-capacity-factor`); without it nothing is dropped.
    pub moe_capacity: Option<Capacity>,
    /// How tokens are dispatched to the ranks of their experts (`--moe-token-dispatcher-type`).
    pub moe_dispatcher: Dispatcher,
    /// Modules of multi-token prediction (`--mtp-num-layers`); DeepSeek-V2 has none.
    pub num_nextn_predict_layers: usize,
    /// Weight of the mean of their losses (`--mtp-loss-scaling-factor`).
    pub mtp_loss_scaling_factor: f64,
    /// Longest sequence that the model was made for. Rotary positions continue beyond it.
    pub max_position_embeddings: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// YaRN's scaling of the rotary frequencies.
    pub rope_scaling: Option<YarnScaling>,
    /// In Hugging Face's and Megatron-LM's files neighbouring features are rotated with each other, else the first half
    /// with the second. In memory always the latter.
    pub rope_interleave: bool,
    /// Epsilon of the norms, but for those of the latents, which have transformers' `1e-6`.
    pub rms_norm_eps: f64,
    /// Standard deviation of the initial weights; projections onto the residual stream get `std / √(2 layers)`, as in
    /// Megatron-LM.
    pub initializer_range: f64,
    /// The size of every rank's shard of the vocabulary is a multiple of this.
    pub make_vocab_size_divisible_by: usize,
}

impl DeepSeekV3Config {
    /// Whether layer `index` has experts; those of multi-token prediction are numbered after the last one.
    pub fn has_experts(&self, index: usize) -> bool {
        index >= self.first_k_dense_replace
    }

    /// Blocks with experts, and blocks without, those of multi-token prediction among them.
    pub fn blocks(&self) -> [usize; 2] {
        let all = self.num_hidden_layers + self.num_nextn_predict_layers;
        let experts = (0..all).filter(|index| self.has_experts(*index)).count();
        [experts, all - experts]
    }

    /// Features of the MLP that all tokens of a layer with experts use.
    pub fn shared_intermediate_size(&self) -> usize {
        self.n_shared_experts * self.moe_intermediate_size
    }

    /// Distribution of embeddings and of projections inside a block.
    pub(super) fn init(&self) -> Init {
        Init::Normal { std: self.initializer_range }
    }

    /// DeepSeek-V2 takes experts' shares as they are, and has no modules of multi-token prediction.
    fn check_variant(&self) -> Result<(), ConfigError> {
        let of_v3 = [
            ("norm_topk_prob", self.norm_topk_prob, "true".to_string()),
            ("num_nextn_predict_layers", self.num_nextn_predict_layers > 0, self.num_nextn_predict_layers.to_string()),
            ("rope_interleave", !self.rope_interleave, "false".to_string()),
        ];
        let v3 = DeepSeekVariant::DeepseekV3;
        match of_v3.into_iter().find(|(_, is_set, _)| *is_set).filter(|_| self.variant != v3) {
            None => Ok(()),
            Some((key, _, value)) => {
                let (owner, variant) = (format!("models of {v3}"), self.variant.to_string());
                Err(ConfigError::Foreign { key, value, owner, variant })
            }
        }
    }

    /// What the sizes make together.
    fn check_products(&self) -> Result<(), ConfigError> {
        let blocks = ("num_hidden_layers", self.num_hidden_layers + self.num_nextn_predict_layers);
        let (hidden, heads) = (("hidden_size", self.hidden_size), ("num_attention_heads", self.num_attention_heads));
        let rotated = ("qk_rope_head_dim", self.qk_rope_head_dim);
        let head = ("v_head_dim", self.v_head_dim + self.qk_nope_head_dim + self.qk_rope_head_dim);
        let latents = ("kv_lora_rank", self.kv_lora_rank + self.q_lora_rank.unwrap_or(0));
        let width = ("moe_intermediate_size", self.moe_intermediate_size);
        let experts = ("n_routed_experts", self.n_routed_experts);
        limits::experts(&[blocks, experts])?;
        limits::reordered(&[blocks, heads, rotated])?;
        limits::elements(&[("vocab_size", self.vocab_size), hidden])?;
        limits::elements(&[blocks, hidden, hidden])?;
        limits::elements(&[blocks, hidden, latents])?;
        limits::elements(&[blocks, hidden, heads, head])?;
        limits::elements(&[blocks, latents, heads, head])?;
        limits::elements(&[blocks, hidden, ("intermediate_size", self.intermediate_size)])?;
        limits::elements(&[blocks, hidden, width, ("n_shared_experts", self.n_shared_experts)])?;
        limits::elements(&[blocks, hidden, width, experts])
    }
}

impl ModelConfig for DeepSeekV3Config {
    fn check(&self) -> Result<(), ConfigError> {
        limits::sizes(self)?;
        self.check_products()?;
        positive(&[
            ("vocab_size", self.vocab_size),
            ("make_vocab_size_divisible_by", self.make_vocab_size_divisible_by),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("q_lora_rank", self.q_lora_rank.unwrap_or(1)),
            ("kv_lora_rank", self.kv_lora_rank),
            ("qk_nope_head_dim", self.qk_nope_head_dim),
            ("v_head_dim", self.v_head_dim),
            ("n_group", self.n_group),
            ("topk_group", self.topk_group),
            ("max_position_embeddings", self.max_position_embeddings),
        ])?;
        self.check_variant()?;
        even("qk_rope_head_dim", self.qk_rope_head_dim)?;
        let (groups, top_k) = (self.n_group, self.topk_group);
        expect(top_k <= groups, ("topk_group", top_k as f64), "at most n_group", groups as f64)?;
        rotary(self.rope_theta, self.rope_scaling.map(RopeScaling::Yarn), self.qk_rope_head_dim)?;
        not_negative(&[
            ("mtp_loss_scaling_factor", self.mtp_loss_scaling_factor),
            ("moe_router_bias_update_rate", self.moe_router_bias_update_rate),
            ("rms_norm_eps", self.rms_norm_eps),
            ("initializer_range", self.initializer_range),
        ])?;
        factors(&[("routed_scaling_factor", self.routed_scaling_factor)])?;
        match self.blocks() {
            [0, _] => Ok(()),
            _ => self.moe(self.init()).check(),
        }
    }

    fn unshared_prefixes(&self) -> Option<UnsharedPrefixes> {
        self.moe_capacity.map(|_| UnsharedPrefixes::Capacity)
    }

    fn dims(&self) -> ModelDims {
        let [experts, dense] = self.blocks();
        // Ranks divide the MLP of the first layers and the shared experts.
        let shared = if experts > 0 { self.shared_intermediate_size() } else { 0 };
        let intermediate = if dense > 0 { self.intermediate_size } else { 0 };
        ModelDims {
            vocab: self.vocab_size,
            hidden: self.hidden_size,
            heads: self.num_attention_heads,
            kv_heads: self.num_attention_heads,
            intermediate: common_divisor(intermediate, shared),
            layers: self.num_hidden_layers,
            max_positions: None,
            states: None,
            experts: (experts > 0)
                .then_some(ExpertDims { count: self.n_routed_experts, intermediate: self.moe_intermediate_size }),
        }
    }

    /// Of sizes that nobody has checked too: [`dims`](ModelConfig::dims) goes through all layers.
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn megatron_names(&self) -> NameMap {
        self.frame().megatron_names(|layer| self.block(layer))
    }

    /// Modules of multi-token prediction are layers after the last one, as in the published files; transformers leaves
    /// them out.
    fn hf_names(&self) -> NameMap {
        self.frame().hf_names(|layer| self.block(layer))
    }

    fn presets() -> Vec<(&'static str, Self)> {
        vec![
            ("deepseek-tiny", Self::tiny()),
            ("deepseek-v3", Self::deepseek_v3()),
            ("moonlight-16b", Self::moonlight_16b()),
            ("kimi-k2", Self::kimi_k2()),
            ("deepseek-v2-lite", Self::deepseek_v2_lite()),
            ("deepseek-v2", Self::deepseek_v2()),
        ]
    }

    /// Copies of the model's embedding and output layer in the modules of multi-token prediction.
    fn hf_is_derived(&self, name: &str) -> bool {
        let ends = [".embed_tokens.weight", ".shared_head.head.weight"];
        name.starts_with("model.layers.") && ends.iter().any(|end| name.ends_with(end))
    }

    /// transformers writes no modules of multi-token prediction, although `config.json` has their number.
    fn hf_present(self, has: impl Fn(&str) -> bool) -> Self {
        let first = format!("model.layers.{}.enorm.weight", self.num_hidden_layers);
        if has(&first) { self } else { Self { num_nextn_predict_layers: 0, ..self } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contradictory_sizes_are_refused() {
        let refuse = |config: DeepSeekV3Config| config.check().unwrap_err().to_string();
        let tiny = DeepSeekV3Config::tiny;
        assert_eq!(tiny().check(), Ok(()));
        assert_eq!(
            refuse(DeepSeekV3Config { qk_rope_head_dim: 5, ..tiny() }),
            "qk_rope_head_dim = 5 is not even and positive; nearest legal: 6"
        );
        assert_eq!(
            refuse(DeepSeekV3Config { topk_group: 5, ..tiny() }),
            "topk_group = 5 is not at most n_group; nearest legal: 4"
        );
        assert_eq!(
            refuse(DeepSeekV3Config { mtp_loss_scaling_factor: -1.0, ..tiny() }),
            "mtp_loss_scaling_factor = -1 is not at least 0; nearest legal: 0"
        );
        assert!(refuse(DeepSeekV3Config { num_experts_per_tok: 9, ..tiny() }).contains("num_experts_per_tok = 9"));
    }

    /// The shared experts are narrower than the MLP of the first layers, and must be divided too.
    #[test]
    fn tensor_parallel_ranks_divide_all_mlps() {
        assert_eq!(DeepSeekV3Config::tiny().dims().intermediate, 32);
        assert_eq!(DeepSeekV3Config { first_k_dense_replace: 4, ..DeepSeekV3Config::tiny() }.dims().intermediate, 128);
        assert_eq!(DeepSeekV3Config::moonlight_16b().dims().intermediate, 2816);
    }
}
