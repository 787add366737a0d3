//! Keys that only some variants have.

use serde_json::json;

use super::config::MixtralConfig;
use super::variant::MixtralVariant;
use crate::config::ConfigError;
use crate::layers::LayerPattern;

/// A key, its value if it is set to anything but what changes nothing, and the variants that have it.
pub(super) type Owned = (&'static str, Option<String>, &'static [MixtralVariant]);

impl MixtralConfig {
    /// The keys that only some variants have, what this model has set of them, and the variants.
    pub(super) fn owned(&self) -> [Owned; 24] {
        use MixtralVariant::{DeepSeek, Glm4Moe, GptOss, Mixtral, Olmoe, Qwen2Moe, Qwen3Moe, Qwen3Next};
        let size = |size: Option<usize>| size.map(|size| size.to_string());
        let pattern = |pattern: &Option<LayerPattern>| pattern.as_ref().map(|pattern| json!(pattern).to_string());
        let number = |number: Option<f64>| number.map(|number| number.to_string());
        [
            (
                "moe_intermediate_size",
                size(self.moe_intermediate_size),
                &[Qwen2Moe, Qwen3Moe, Qwen3Next, Glm4Moe, DeepSeek],
            ),
            (
                "shared_expert_intermediate_size",
                size(self.shared_expert_intermediate_size),
                &[Qwen2Moe, Qwen3Next, Glm4Moe, DeepSeek],
            ),
            (
                "decoder_sparse_step",
                size(Some(self.decoder_sparse_step).filter(|step| *step != 1)),
                &[Qwen2Moe, Qwen3Moe, Qwen3Next],
            ),
            ("mlp_only_layers", size(self.mlp_only_layers.first().copied()), &[Qwen2Moe, Qwen3Moe, Qwen3Next]),
            (
                "attention_bias",
                size(self.attention_bias.then_some(1)),
                &[Qwen3Moe, GptOss, Qwen3Next, Glm4Moe, Olmoe, DeepSeek],
            ),
            (
                "norm_topk_prob",
                size((!self.norm_topk_prob).then_some(0)),
                &[Qwen2Moe, Qwen3Moe, Qwen3Next, Glm4Moe, Olmoe, DeepSeek],
            ),
            ("sliding_window", size(self.sliding_window), &[Mixtral, GptOss, Qwen2Moe, Qwen3Moe]),
            ("sliding_window_pattern", pattern(&self.sliding_window_pattern), &[Mixtral, GptOss, Qwen2Moe]),
            ("swiglu_limit", number(self.swiglu_limit), &[GptOss]),
            ("partial_rotary_factor", number(self.partial_rotary_factor), &[Qwen3Next, Glm4Moe]),
            ("use_qk_norm", size(self.use_qk_norm.then_some(1)), &[Glm4Moe]),
            (
                "first_k_dense_replace",
                size(Some(self.first_k_dense_replace).filter(|layers| *layers != 0)),
                &[Glm4Moe, DeepSeek],
            ),
            ("n_group", size(Some(self.n_group).filter(|groups| *groups != 1)), &[Glm4Moe]),
            ("topk_group", size(Some(self.topk_group).filter(|groups| *groups != 1)), &[Glm4Moe]),
            (
                "routed_scaling_factor",
                number(Some(self.routed_scaling_factor).filter(|factor| *factor != 1.0)),
                &[Glm4Moe],
            ),
            ("moe_router_bias_update_rate", number(self.moe_router_bias_update_rate), &[Glm4Moe]),
            (
                "num_nextn_predict_layers",
                size(Some(self.num_nextn_predict_layers).filter(|modules| *modules != 0)),
                &[Qwen3Next, Glm4Moe],
            ),
            ("mtp_loss_scaling_factor", number(self.mtp_loss_scaling_factor), &[Qwen3Next, Glm4Moe]),
            ("full_attention_interval", pattern(&self.full_attention_interval), &[Qwen3Next]),
            ("linear_num_key_heads", size(self.linear_num_key_heads), &[Qwen3Next]),
            ("linear_num_value_heads", size(self.linear_num_value_heads), &[Qwen3Next]),
            ("linear_key_head_dim", size(self.linear_key_head_dim), &[Qwen3Next]),
            ("linear_value_head_dim", size(self.linear_value_head_dim), &[Qwen3Next]),
            ("linear_conv_kernel_dim", size(self.linear_conv_kernel_dim), &[Qwen3Next]),
        ]
    }

    /// Whether only keys are set that the variant has.
    pub(super) fn check_variant(&self) -> Result<(), ConfigError> {
        let given =
            |(key, value, owners): Owned| Some((key, value?, owners)).filter(|_| !owners.contains(&self.variant));
        match self.owned().into_iter().find_map(given) {
            None => Ok(()),
            Some((key, value, owners)) => {
                let owners: Vec<String> = owners.iter().map(|owner| format!("\"{owner}\"")).collect();
                let (owner, variant) =
                    (format!("models with `variant = {}`", owners.join("` or `")), self.variant.to_string());
                Err(ConfigError::Foreign { key, value, owner, variant })
            }
        }
    }
}
