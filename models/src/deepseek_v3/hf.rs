//! DeepSeek-V3's `config.json`.

use serde_json::{Value, json};

use super::config::DeepSeekV3Config;
use crate::hf::{ConfigReader, HfArchitecture, HfError, keys, rope, written};
use crate::layers::{BalanceOver, RopeScaling, YarnScaling};

/// What Hugging Face calls it, and what Moonshot AI calls the same architecture.
pub(super) const ARCHITECTURES: [HfArchitecture; 2] = [
    HfArchitecture::new("deepseek_v3", "DeepseekV3ForCausalLM"),
    HfArchitecture::new("kimi_k2", "DeepseekV3ForCausalLM"),
];

/// Keys that repeat what the architecture is, or say how DeepSeek serves it.
const HARMLESS: [&str; 4] = ["auto_map", "ep_size", "num_key_value_heads", "output_router_logits"];

/// What files do not have, or under other names.
const OURS: [&str; 9] = keys![
    "moe_router_bias_update_rate" "router_aux_loss_coef" "router_balance" "moe_capacity" "moe_dispatcher"
    "mtp_loss_scaling_factor" "rope_theta" "rope_scaling" "make_vocab_size_divisible_by"
];

impl DeepSeekV3Config {
    /// Reads a `config.json` with `"model_type": "deepseek_v3"`, as transformers 5 writes it or as DeepSeek published
    /// it, or `"kimi_k2"`, which Moonshot AI calls the same architecture. An absent key has transformers' default.
    ///
    /// # Errors
    /// Names the key that is missing, unknown, or asks for something this model does not do.
    pub fn from_hf(config: &Value) -> Result<Self, HfError> {
        let config = ConfigReader::new(config)?;
        let [deepseek, kimi] = ARCHITECTURES;
        let is_kimi = config.text("model_type")? == Some(kimi.model_type);
        config.expect_model(if is_kimi { kimi } else { deepseek })?;
        config.expect_or_absent("hidden_act", "silu")?;
        config.quantisation("fp8")?;
        config.expect_or_absent("scoring_func", "sigmoid")?;
        config.expect_or_absent("topk_method", "noaux_tc")?;
        config.expect_number("moe_layer_freq", 1.0, 1.0)?;
        config.expect_number("attention_dropout", 0.0, 0.0)?;
        config.expect_flag("attention_bias", false)?;
        config.expect_flag("tie_word_embeddings", false)?;
        let (rope_theta, rope_scaling) = rotary(&config)?;
        let (router_aux_loss_coef, router_balance) = balance(&config)?;
        let read = Self {
            vocab_size: config.size("vocab_size")?,
            hidden_size: config.size("hidden_size")?,
            intermediate_size: config.size("intermediate_size")?,
            moe_intermediate_size: config.size("moe_intermediate_size")?,
            num_hidden_layers: config.size("num_hidden_layers")?,
            first_k_dense_replace: config.count_or("first_k_dense_replace", 3)?,
            num_attention_heads: config.size("num_attention_heads")?,
            q_lora_rank: if config.has("q_lora_rank") { config.optional_size("q_lora_rank")? } else { Some(1536) },
            kv_lora_rank: config.size_or("kv_lora_rank", 512)?,
            qk_nope_head_dim: config.size_or("qk_nope_head_dim", 128)?,
            qk_rope_head_dim: config.size_or("qk_rope_head_dim", 64)?,
            v_head_dim: config.size_or("v_head_dim", 128)?,
            n_routed_experts: config.size("n_routed_experts")?,
            n_shared_experts: config.count_or("n_shared_experts", 1)?,
            num_experts_per_tok: config.size("num_experts_per_tok")?,
            n_group: config.size_or("n_group", 8)?,
            topk_group: config.size_or("topk_group", 4)?,
            norm_topk_prob: config.norm_topk_prob(config.size("num_experts_per_tok")?)?,
            router_aux_loss_coef,
            router_balance,
            routed_scaling_factor: config.number("routed_scaling_factor")?.unwrap_or(2.5),
            num_nextn_predict_layers: config.count_or("num_nextn_predict_layers", 0)?,
            max_position_embeddings: config.size_or("max_position_embeddings", 4096)?,
            rope_theta,
            rope_scaling,
            rope_interleave: config.flag_or("rope_interleave", true)?,
            rms_norm_eps: config.number("rms_norm_eps")?.unwrap_or(1e-6),
            initializer_range: config.number("initializer_range")?.unwrap_or(0.02),
            make_vocab_size_divisible_by: 1,
            ..Self::deepseek_v3()
        };
        for (key, size) in
            [("head_dim", read.qk_rope_head_dim), ("qk_head_dim", read.qk_nope_head_dim + read.qk_rope_head_dim)]
        {
            config.expect_number(key, size as f64, size as f64)?;
        }
        config.finish(&HARMLESS)?;
        Ok(read)
    }

    /// The `config.json` of this model, in the form of transformers 5, with DeepSeek's keys of the load-balancing loss.
    /// They have no word for one over all micro-batches of a step, which is written as one over a micro-batch.
    pub fn to_hf(&self) -> Value {
        let rope = rope::written(self.rope_theta, self.rope_scaling.map(RopeScaling::Yarn));
        let further = json!({
            "architectures": [ARCHITECTURES[0].class],
            "model_type": "deepseek_v3",
            "hidden_act": "silu",
            "rope_parameters": rope,
            "norm_topk_prob": self.norm_topk_prob && self.num_experts_per_tok > 1,
            "aux_loss_alpha": self.router_aux_loss_coef,
            "seq_aux": self.router_balance == BalanceOver::Sequence,
            "num_key_value_heads": self.num_attention_heads,
            "qk_head_dim": self.qk_nope_head_dim + self.qk_rope_head_dim,
            "attention_bias": false,
            "attention_dropout": 0.0,
            "tie_word_embeddings": false,
        });
        written(self, &OURS, further)
    }
}

/// The coefficient of the load-balancing loss, and the tokens that it balances. These are the keys of DeepSeek's own
/// code (`MoEGate` in `modeling_deepseek.py`), whose two losses are Megatron's `seq_aux_loss` and `aux_loss`. Mixtral's
/// `router_aux_loss_coef` is another name of the coefficient. transformers' DeepSeek-V3 has none of them; without them
/// the coefficient is that of DeepSeek-V3's report.
fn balance(config: &ConfigReader) -> Result<(f64, BalanceOver), HfError> {
    let (alpha, coefficient) = (config.number("aux_loss_alpha")?, config.number("router_aux_loss_coef")?);
    if let (Some(alpha), Some(coefficient)) = (alpha, coefficient)
        && alpha != coefficient
    {
        let legal = format!("aux_loss_alpha ({alpha})");
        return Err(config.unsupported("router_aux_loss_coef", &coefficient.to_string(), &legal));
    }
    let over = if config.flag_or("seq_aux", true)? { BalanceOver::Sequence } else { BalanceOver::MicroBatch };
    let report = DeepSeekV3Config::deepseek_v3().router_aux_loss_coef;
    Ok((alpha.or(coefficient).unwrap_or(report), over))
}

/// Base and scaling of the rotary frequencies.
fn rotary(config: &ConfigReader) -> Result<(f64, Option<YarnScaling>), HfError> {
    let (theta, scaling) = rope::read(config, 10_000.0)?;
    match scaling {
        None => Ok((theta, None)),
        Some(RopeScaling::Yarn(scaling)) => Ok((theta, Some(scaling))),
        Some(other) => Err(config.unsupported("rope_type", other.name(), "default, yarn")),
    }
}
