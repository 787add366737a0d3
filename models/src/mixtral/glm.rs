//! GLM-4.5's routing, which is DeepSeek-V3's, and its keys in `config.json`. Defaults are those of
//! `configuration_glm4_moe.py`.

use serde_json::{Value, json};

use super::config::MixtralConfig;
use super::variant::MixtralVariant;
use crate::config::{ConfigError, divides, expect, factors, not_negative, positive};
use crate::hf::{ConfigReader, HfError};
use crate::layers::{BalanceOver, RouterConfig, Scores};

/// Share of a head's features that are rotated.
pub(super) const ROTATED: f64 = 0.5;
/// That of GLM-4.5's report (<https://arxiv.org/abs/2508.06471>).
const BIAS_UPDATE_RATE: f64 = 0.001;
/// The same report's coefficient of the load-balancing loss of each sequence; `config.json` has none.
const BALANCE: f64 = 0.0001;

impl MixtralConfig {
    /// How experts are chosen, without the losses of it.
    pub(super) fn routing(&self) -> RouterConfig {
        let (top_k, is_normalised) = (self.num_experts_per_tok, self.norm_topk_prob);
        if self.variant != MixtralVariant::Glm4Moe {
            let scores = if is_normalised { Scores::NormalisedSoftmax } else { Scores::SoftmaxBeforeTopK };
            return RouterConfig { scores, ..RouterConfig::new(top_k) };
        }
        let bias_rate = self.moe_router_bias_update_rate.unwrap_or(BIAS_UPDATE_RATE);
        let groups = [self.n_group, self.topk_group];
        RouterConfig::sigmoid(top_k, is_normalised, groups, self.routed_scaling_factor, bias_rate)
    }

    pub(super) fn check_routing(&self) -> Result<(), ConfigError> {
        let (groups, top_k) = (self.n_group, self.topk_group);
        positive(&[("n_group", groups), ("topk_group", top_k)])?;
        expect(top_k <= groups, ("topk_group", top_k as f64), "at most n_group", groups as f64)?;
        not_negative(&[("moe_router_bias_update_rate", self.moe_router_bias_update_rate.unwrap_or(0.0))])?;
        factors(&[("routed_scaling_factor", self.routed_scaling_factor)])?;
        match (self.variant, self.shared_expert()) {
            // `config.json` has the number of shared experts, each as wide as a routed one.
            (MixtralVariant::Glm4Moe | MixtralVariant::DeepSeek, Some(shared)) => {
                divides("moe_intermediate_size", self.expert_size(), "shared_expert_intermediate_size", shared)
            }
            _ => Ok(()),
        }
    }

    /// Adds the keys that only this model has to its `config.json`.
    pub(super) fn write_glm(&self, config: &mut Value) {
        let keys = json!({
            "moe_intermediate_size": self.expert_size(),
            "n_routed_experts": self.num_experts,
            "n_shared_experts": self.shared_expert().unwrap_or(0) / self.expert_size().max(1),
            "first_k_dense_replace": self.first_k_dense_replace,
            "n_group": self.n_group,
            "topk_group": self.topk_group,
            "norm_topk_prob": self.norm_topk_prob && self.num_experts_per_tok > 1,
            "routed_scaling_factor": self.routed_scaling_factor,
            "num_nextn_predict_layers": self.num_nextn_predict_layers,
            "attention_bias": self.attention_bias,
            "use_qk_norm": self.use_qk_norm,
            "partial_rotary_factor": self.rotated_share(),
        });
        self.add_keys(config, keys);
    }
}

/// The rest of a `config.json` whose common keys have been read.
pub(super) fn read(config: &ConfigReader, common: MixtralConfig) -> Result<MixtralConfig, HfError> {
    let width = config.size("moe_intermediate_size")?;
    Ok(MixtralConfig {
        head_dim: config.size_or("head_dim", common.hidden_size / common.num_attention_heads)?,
        moe_intermediate_size: Some(width),
        shared_expert_intermediate_size: Some(config.size_or("n_shared_experts", 1)?.saturating_mul(width)),
        first_k_dense_replace: config.count_or("first_k_dense_replace", 1)?,
        n_group: config.size_or("n_group", 1)?,
        topk_group: config.size_or("topk_group", 1)?,
        norm_topk_prob: config.norm_topk_prob(common.num_experts_per_tok)?,
        routed_scaling_factor: config.number("routed_scaling_factor")?.unwrap_or(1.0),
        attention_bias: config.flag("attention_bias")?,
        use_qk_norm: config.flag("use_qk_norm")?,
        num_nextn_predict_layers: config.count_or("num_nextn_predict_layers", 0)?,
        partial_rotary_factor: Some(common.partial_rotary_factor.unwrap_or(ROTATED)),
        router_aux_loss_coef: config.number("router_aux_loss_coef")?.unwrap_or(BALANCE),
        router_balance: BalanceOver::Sequence,
        ..common
    })
}
