//! The `config.json` of DeepSeek's first model with experts, whose code is not transformers' but in the folder. Defaults are those of
//! its `configuration_deepseek.py`.

use serde_json::{Value, json};

use super::config::MixtralConfig;
use crate::deepseek_v3::{balance, seq_aux};
use crate::hf::{ConfigReader, HfError};

/// The load-balancing loss.
const BALANCE: f64 = 0.001;

/// The rest of a `config.json` whose common keys have been read.
pub(super) fn read(config: &ConfigReader, common: MixtralConfig) -> Result<MixtralConfig, HfError> {
    config.expect_or_absent("scoring_func", "softmax")?;
    config.expect_number("moe_layer_freq", 1.0, 1.0)?;
    let width = config.size("moe_intermediate_size")?;
    let (router_aux_loss_coef, router_balance) = balance(config, BALANCE)?;
    Ok(MixtralConfig {
        head_dim: config.size_or("head_dim", common.hidden_size / common.num_attention_heads)?,
        moe_intermediate_size: Some(width),
        shared_expert_intermediate_size: Some(config.size("n_shared_experts")?.saturating_mul(width)),
        first_k_dense_replace: config.count_or("first_k_dense_replace", 0)?,
        norm_topk_prob: config.flag("norm_topk_prob")?,
        attention_bias: config.flag("attention_bias")?,
        router_aux_loss_coef,
        router_balance,
        ..common
    })
}

impl MixtralConfig {
    /// Adds the keys that only this model has to its `config.json`, with rotary parameters as its code reads them.
    pub(super) fn write_deepseek(&self, config: &mut Value) {
        let keys = json!({
            "moe_intermediate_size": self.expert_size(),
            "n_routed_experts": self.num_experts,
            "n_shared_experts": self.shared_expert().unwrap_or(0) / self.expert_size().max(1),
            "first_k_dense_replace": self.first_k_dense_replace,
            "norm_topk_prob": self.norm_topk_prob,
            "attention_bias": self.attention_bias,
            "scoring_func": "softmax",
            "moe_layer_freq": 1,
            "aux_loss_alpha": self.router_aux_loss_coef,
            "seq_aux": seq_aux(self.router_balance),
        });
        self.add_keys(config, keys);
        let Some(config) = config.as_object_mut() else { return };
        config.remove("router_aux_loss_coef");
        let mut rope = config.remove("rope_parameters").unwrap_or_default();
        config.insert("rope_theta".into(), rope["rope_theta"].clone());
        rope["type"] = rope["rope_type"].take();
        let is_scaled = rope["type"] != "default";
        if let Some(rope) = rope.as_object_mut() {
            rope.retain(|key, value| key != "rope_theta" && !value.is_null());
        }
        config.insert("rope_scaling".into(), if is_scaled { rope } else { Value::Null });
    }
}
