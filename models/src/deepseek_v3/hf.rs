//! The `config.json` of DeepSeek-V3 and V2.

use serde_json::{Value, json};

use super::config::DeepSeekV3Config;
use super::variant::{DeepSeekVariant, VARIANTS};
use crate::hf::{ConfigReader, HfArchitecture, HfError, keys, rope, written};
use crate::layers::{BalanceOver, RopeScaling, YarnScaling};

/// What Moonshot AI calls a DeepSeek-V3.
pub(super) const KIMI: HfArchitecture = HfArchitecture::new("kimi_k2", "DeepseekV3ForCausalLM");

/// Keys that repeat what the architecture is, or say how DeepSeek serves it.
const HARMLESS: [&str; 4] = ["auto_map", "ep_size", "num_key_value_heads", "output_router_logits"];

/// What files do not have, or under other names.
const OURS: [&str; 10] = keys![
    "variant"
    "moe_router_bias_update_rate" "router_aux_loss_coef" "router_balance" "moe_capacity" "moe_dispatcher"
    "mtp_loss_scaling_factor" "rope_theta" "rope_scaling" "make_vocab_size_divisible_by"
];

impl DeepSeekV3Config {
    /// Reads a `config.json` with `"model_type": "deepseek_v3"` or `"deepseek_v2"`, as transformers 5 writes it or as DeepSeek
    /// published it, or `"kimi_k2"`, which Moonshot AI calls a DeepSeek-V3. An absent key has transformers' default.
    ///
    /// # Errors
    /// Names the key that is missing, unknown, or asks for something this model does not do.
    pub fn from_hf(config: &Value) -> Result<Self, HfError> {
        let config = ConfigReader::new(config)?;
        let kind = config.text("model_type")?;
        let variant = VARIANTS.into_iter().find(|variant| kind == Some(variant.hf().model_type)).unwrap_or_default();
        config.expect_model(if kind == Some(KIMI.model_type) { KIMI } else { variant.hf() })?;
        let defaults = Defaults::of(variant);
        config.expect_or_absent("hidden_act", "silu")?;
        config.quantisation("fp8")?;
        config.expect_or_absent("scoring_func", defaults.scores)?;
        let has_groups = match variant {
            DeepSeekVariant::DeepseekV3 => config.expect_or_absent("topk_method", "noaux_tc").map(|()| true)?,
            DeepSeekVariant::DeepseekV2 => chooses_groups(&config)?,
        };
        config.expect_number("moe_layer_freq", 1.0, 1.0)?;
        config.expect_number("attention_dropout", 0.0, 0.0)?;
        config.expect_flag("attention_bias", false)?;
        config.expect_flag("tie_word_embeddings", false)?;
        let (rope_theta, rope_scaling) = rotary(&config)?;
        let (router_aux_loss_coef, router_balance) = balance(&config, defaults.balance)?;
        let num_experts_per_tok = config.size("num_experts_per_tok")?;
        let mut read = Self {
            variant,
            vocab_size: config.size("vocab_size")?,
            hidden_size: config.size("hidden_size")?,
            intermediate_size: config.size("intermediate_size")?,
            moe_intermediate_size: config.size("moe_intermediate_size")?,
            num_hidden_layers: config.size("num_hidden_layers")?,
            first_k_dense_replace: config.count_or("first_k_dense_replace", defaults.dense_layers)?,
            num_attention_heads: config.size("num_attention_heads")?,
            q_lora_rank: if config.has("q_lora_rank") { config.optional_size("q_lora_rank")? } else { Some(1536) },
            kv_lora_rank: config.size_or("kv_lora_rank", 512)?,
            qk_nope_head_dim: config.size_or("qk_nope_head_dim", 128)?,
            qk_rope_head_dim: config.size_or("qk_rope_head_dim", 64)?,
            v_head_dim: config.size_or("v_head_dim", 128)?,
            n_routed_experts: config.size("n_routed_experts")?,
            n_shared_experts: config.count_or("n_shared_experts", defaults.shared_experts)?,
            num_experts_per_tok,
            n_group: config.size_or("n_group", defaults.groups[0])?,
            topk_group: config.size_or("topk_group", defaults.groups[1])?,
            norm_topk_prob: match variant {
                DeepSeekVariant::DeepseekV3 => config.norm_topk_prob(num_experts_per_tok)?,
                // transformers takes the shares as they are, DeepSeek's own code does without the factor if this is true.
                DeepSeekVariant::DeepseekV2 => config.expect_flag("norm_topk_prob", false).map(|()| false)?,
            },
            router_aux_loss_coef,
            router_balance,
            routed_scaling_factor: config.number("routed_scaling_factor")?.unwrap_or(defaults.scaling),
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
        if !has_groups {
            (read.n_group, read.topk_group) = (1, 1);
        }
        for (key, size) in
            [("head_dim", read.qk_rope_head_dim), ("qk_head_dim", read.qk_nope_head_dim + read.qk_rope_head_dim)]
        {
            config.expect_number(key, size as f64, size as f64)?;
        }
        if variant == DeepSeekVariant::DeepseekV2 {
            config.expect_flag("mlp_bias", false)?;
            config.expect_flag("rope_interleave", true)?;
        }
        config.finish(&HARMLESS)?;
        Ok(read)
    }

    /// The `config.json` of this model, in the form of transformers 5, with DeepSeek's keys of the load-balancing loss.
    /// They have no word for one over all micro-batches of a step, which is written as one over a micro-batch.
    pub fn to_hf(&self) -> Value {
        let rope = rope::written(self.rope_theta, self.rope_scaling.map(RopeScaling::Yarn));
        let further = json!({
            "architectures": [self.variant.hf().class],
            "model_type": self.variant.hf().model_type,
            "hidden_act": "silu",
            "rope_parameters": rope,
            "norm_topk_prob": self.norm_topk_prob && self.num_experts_per_tok > 1,
            "aux_loss_alpha": self.router_aux_loss_coef,
            "seq_aux": seq_aux(self.router_balance),
            "num_key_value_heads": self.num_attention_heads,
            "qk_head_dim": self.qk_nope_head_dim + self.qk_rope_head_dim,
            "attention_bias": false,
            "attention_dropout": 0.0,
            "tie_word_embeddings": false,
        });
        let mut file = written(self, &OURS, further);
        if self.variant == DeepSeekVariant::DeepseekV2 {
            let method = if self.n_group > 1 { GROUPS } else { "greedy" };
            (file["scoring_func"], file["topk_method"]) = (json!("softmax"), json!(method));
            for key in ["num_nextn_predict_layers", "rope_interleave"] {
                file.as_object_mut().map(|keys| keys.remove(key));
            }
        }
        file
    }
}

/// transformers' defaults that are not the same for both.
struct Defaults {
    scores: &'static str,
    dense_layers: usize,
    shared_experts: usize,
    groups: [usize; 2],
    scaling: f64,
    /// That of the report.
    balance: f64,
}

impl Defaults {
    fn of(variant: DeepSeekVariant) -> Self {
        let (scores, balance) = ("sigmoid", DeepSeekV3Config::deepseek_v3().router_aux_loss_coef);
        let v3 = Self { scores, dense_layers: 3, shared_experts: 1, groups: [8, 4], scaling: 2.5, balance };
        match variant {
            DeepSeekVariant::DeepseekV3 => v3,
            DeepSeekVariant::DeepseekV2 => {
                let (scores, balance) = ("softmax", DeepSeekV3Config::deepseek_v2().router_aux_loss_coef);
                Self { scores, dense_layers: 0, shared_experts: 2, groups: [1, 1], scaling: 1.0, balance }
            }
        }
    }
}

/// DeepSeek-V2's word for choosing from groups.
const GROUPS: &str = "group_limited_greedy";

/// Whether a DeepSeek-V2 chooses from groups; otherwise their number says nothing.
fn chooses_groups(config: &ConfigReader) -> Result<bool, HfError> {
    match config.text("topk_method")? {
        None | Some("greedy") => Ok(false),
        Some(GROUPS) => Ok(true),
        Some(other) => Err(config.unsupported("topk_method", other, &format!("greedy, {GROUPS}"))),
    }
}

/// DeepSeek's key of the tokens that the load is balanced over.
pub(crate) fn seq_aux(over: BalanceOver) -> bool {
    over == BalanceOver::Sequence
}

/// The coefficient of the load-balancing loss, and the tokens that it balances. These are the keys of DeepSeek's own
/// code (`MoEGate` in `modeling_deepseek.py`), whose two losses are Megatron's `seq_aux_loss` and `aux_loss`. Mixtral's
/// `router_aux_loss_coef` is another name of the coefficient. transformers' DeepSeek-V3 has none of them; without them
/// the coefficient is `report`, that of the model's report.
pub(crate) fn balance(config: &ConfigReader, report: f64) -> Result<(f64, BalanceOver), HfError> {
    let (alpha, coefficient) = (config.number("aux_loss_alpha")?, config.number("router_aux_loss_coef")?);
    if let (Some(alpha), Some(coefficient)) = (alpha, coefficient)
        && alpha != coefficient
    {
        let legal = format!("aux_loss_alpha ({alpha})");
        return Err(config.unsupported("router_aux_loss_coef", &coefficient.to_string(), &legal));
    }
    let over = if config.flag_or("seq_aux", true)? { BalanceOver::Sequence } else { BalanceOver::MicroBatch };
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
