//! What others know of DeepSeek-V3 by its name.

use serde_json::Value;

use super::config::DeepSeekV3Config;
use super::hf::KIMI;
use super::variant::{DeepSeekVariant, VARIANTS};
use crate::family::{Family, Sample, SampleSizes};
use crate::hf::{HfArchitecture, HfError};
use crate::layers::BalanceOver;
use crate::sized;

impl Family for DeepSeekV3Config {
    const SIZES: &'static [(&'static str, &'static str)] = &[
        ("n_shared_experts", "Number of shared experts of a layer, which every token uses"),
        ("q_lora_rank", "MLA: rank of the query latent; none: queries are projected from the hidden states"),
        ("kv_lora_rank", "MLA: rank of the key-value latent"),
        ("qk_nope_head_dim", "MLA: query and key head dimension without RoPE"),
        ("qk_rope_head_dim", "MLA: query and key head dimension with RoPE"),
        ("v_head_dim", "MLA: value head dimension"),
        ("rope_interleave", "Hugging Face files interleave the RoPE dimensions instead of splitting them in halves"),
    ];

    fn architectures() -> Vec<HfArchitecture> {
        let [v3, v2] = VARIANTS.map(DeepSeekVariant::hf);
        vec![v3, KIMI, v2]
    }

    fn read_hf(config: &Value, _kind: &str) -> Result<Self, HfError> {
        Self::from_hf(config)
    }

    fn write_hf(&self) -> Result<Value, HfError> {
        Ok(self.to_hf())
    }

    fn owners(key: &str) -> Vec<String> {
        if key == "variant" { VARIANTS.map(|variant| variant.to_string()).to_vec() } else { Vec::new() }
    }

    /// Heads have DeepSeek-V3's proportions: two parts that are not rotated, one that is, and values of two.
    fn samples(sizes: &SampleSizes) -> Vec<Sample<Self>> {
        let part = sizes.head_dim();
        let config = sized! { Self::tiny();
            vocab_size: sizes.vocab, hidden_size: sizes.hidden, intermediate_size: sizes.intermediate,
            moe_intermediate_size: sizes.intermediate / 2, num_hidden_layers: sizes.layers,
            num_attention_heads: sizes.heads, q_lora_rank: Some(sizes.hidden / 2), kv_lora_rank: sizes.hidden / 2,
            qk_nope_head_dim: 2 * part, qk_rope_head_dim: part, v_head_dim: 2 * part,
            moe_router_bias_update_rate: 0.01, router_aux_loss_coef: 0.01, router_balance: BalanceOver::Sequence,
            num_nextn_predict_layers: 2, mtp_loss_scaling_factor: 0.5
        };
        let about = "Latent attention with YaRN, an MLP in the first layer, then eight experts in four groups, chosen by \
                     sigmoid scores and a bias, and a shared one; two modules of multi-token prediction";
        let v2 = sized! { config.clone();
            variant: DeepSeekVariant::DeepseekV2, n_shared_experts: 2, norm_topk_prob: false, num_nextn_predict_layers: 0
        };
        let about_v2 = "The same without further tokens, with experts chosen by their share of a softmax, from groups by their \
                        best one";
        vec![Sample::new("deepseek-v3", about, config), Sample::new("deepseek-v2", about_v2, v2)]
    }
}
