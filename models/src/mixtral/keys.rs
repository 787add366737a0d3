//! Keys that only some variants have.

use super::config::MixtralConfig;
use super::variant::MixtralVariant;
use crate::config::ConfigError;

impl MixtralConfig {
    /// Whether only keys are set that the variant has.
    pub(super) fn check_variant(&self) -> Result<(), ConfigError> {
        use MixtralVariant::{GptOss, Qwen2Moe, Qwen3Moe, Qwen3Next};
        let size = |size: Option<usize>| size.map(|size| size.to_string());
        let foreign: [(_, Option<String>, &[MixtralVariant]); 16] = [
            ("moe_intermediate_size", size(self.moe_intermediate_size), &[Qwen2Moe, Qwen3Moe, Qwen3Next]),
            ("shared_expert_intermediate_size", size(self.shared_expert_intermediate_size), &[Qwen2Moe, Qwen3Next]),
            (
                "decoder_sparse_step",
                size(Some(self.decoder_sparse_step).filter(|step| *step != 1)),
                &[Qwen2Moe, Qwen3Moe, Qwen3Next],
            ),
            ("mlp_only_layers", size(self.mlp_only_layers.first().copied()), &[Qwen2Moe, Qwen3Moe, Qwen3Next]),
            ("attention_bias", size(self.attention_bias.then_some(1)), &[Qwen3Moe, GptOss, Qwen3Next]),
            ("norm_topk_prob", size((!self.norm_topk_prob).then_some(0)), &[Qwen2Moe, Qwen3Moe, Qwen3Next]),
            ("sliding_window", size(self.sliding_window), &[GptOss]),
            ("sliding_window_pattern", size(self.sliding_window_pattern), &[GptOss]),
            ("swiglu_limit", self.swiglu_limit.map(|limit| limit.to_string()), &[GptOss]),
            ("partial_rotary_factor", self.partial_rotary_factor.map(|share| share.to_string()), &[Qwen3Next]),
            ("full_attention_interval", size(self.full_attention_interval), &[Qwen3Next]),
            ("linear_num_key_heads", size(self.linear_num_key_heads), &[Qwen3Next]),
            ("linear_num_value_heads", size(self.linear_num_value_heads), &[Qwen3Next]),
            ("linear_key_head_dim", size(self.linear_key_head_dim), &[Qwen3Next]),
            ("linear_value_head_dim", size(self.linear_value_head_dim), &[Qwen3Next]),
            ("linear_conv_kernel_dim", size(self.linear_conv_kernel_dim), &[Qwen3Next]),
        ];
        let given = |(key, value, owners): (&'static str, Option<String>, &'static [MixtralVariant])| {
            Some((key, value?, owners)).filter(|_| !owners.contains(&self.variant))
        };
        match foreign.into_iter().find_map(given) {
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
