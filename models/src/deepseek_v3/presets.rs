//! Known sizes.

use super::config::DeepSeekV3Config;
use super::variant::DeepSeekVariant;
use crate::layers::{BalanceOver, Dispatcher, YarnScaling};
use crate::sized;

/// YaRN from 4,096 to 163,840 positions.
fn sharpened(weight: f64) -> YarnScaling {
    YarnScaling { mscale: Some(weight), mscale_all_dim: Some(weight), ..YarnScaling::new(40.0, 4096) }
}

/// [`DeepSeekV3Config::tiny`].
impl Default for DeepSeekV3Config {
    fn default() -> Self {
        Self::tiny()
    }
}

impl DeepSeekV3Config {
    /// Small enough for tests: 0.2 million parameters, every feature of the large one.
    pub fn tiny() -> Self {
        Self {
            variant: DeepSeekVariant::DeepseekV3,
            vocab_size: 256,
            hidden_size: 64,
            intermediate_size: 128,
            moe_intermediate_size: 32,
            num_hidden_layers: 3,
            first_k_dense_replace: 1,
            num_attention_heads: 8,
            q_lora_rank: Some(32),
            kv_lora_rank: 16,
            qk_nope_head_dim: 8,
            qk_rope_head_dim: 4,
            v_head_dim: 8,
            n_routed_experts: 8,
            n_shared_experts: 1,
            num_experts_per_tok: 2,
            n_group: 4,
            topk_group: 2,
            norm_topk_prob: true,
            routed_scaling_factor: 2.5,
            moe_router_bias_update_rate: 0.001,
            router_aux_loss_coef: 0.0001,
            router_balance: BalanceOver::Sequence,
            moe_capacity: None,
            moe_dispatcher: Dispatcher::AllToAll,
            num_nextn_predict_layers: 1,
            mtp_loss_scaling_factor: 0.1,
            max_position_embeddings: 2560,
            rope_theta: 10_000.0,
            rope_scaling: Some(YarnScaling {
                mscale: Some(1.0),
                mscale_all_dim: Some(1.0),
                ..YarnScaling::new(40.0, 64)
            }),
            rope_interleave: true,
            rms_norm_eps: 1e-6,
            initializer_range: 0.02,
            make_vocab_size_divisible_by: 1,
        }
    }

    /// DeepSeek-V3 and R1: 671 billion parameters, 37 of which a token uses, and 11.6 billion of multi-token
    /// prediction.
    pub fn deepseek_v3() -> Self {
        sized! { Self::tiny();
            vocab_size: 129_280, hidden_size: 7168, intermediate_size: 18_432, moe_intermediate_size: 2048,
            num_hidden_layers: 61, first_k_dense_replace: 3, num_attention_heads: 128, q_lora_rank: Some(1536),
            kv_lora_rank: 512, qk_nope_head_dim: 128, qk_rope_head_dim: 64, v_head_dim: 128, n_routed_experts: 256,
            num_experts_per_tok: 8, n_group: 8, topk_group: 4, max_position_embeddings: 163_840,
            rope_scaling: Some(sharpened(1.0)), make_vocab_size_divisible_by: 128
        }
    }

    /// DeepSeek-V2: 236 billion parameters, 21 of which a token uses.
    pub fn deepseek_v2() -> Self {
        sized! { Self::deepseek_v2_lite();
            hidden_size: 5120, intermediate_size: 12_288, moe_intermediate_size: 1536, num_hidden_layers: 60,
            num_attention_heads: 128, q_lora_rank: Some(1536), n_routed_experts: 160, n_group: 8, topk_group: 3,
            routed_scaling_factor: 16.0, rope_scaling: Some(sharpened(0.707))
        }
    }

    /// DeepSeek-V2-Lite: 16 billion parameters, 2.4 of which a token uses.
    pub fn deepseek_v2_lite() -> Self {
        sized! { Self::deepseek_v3();
            variant: DeepSeekVariant::DeepseekV2, vocab_size: 102_400, hidden_size: 2048, intermediate_size: 10_944,
            moe_intermediate_size: 1408, num_hidden_layers: 27, first_k_dense_replace: 1, num_attention_heads: 16,
            q_lora_rank: None, n_routed_experts: 64, n_shared_experts: 2, num_experts_per_tok: 6, n_group: 1,
            topk_group: 1, norm_topk_prob: false, routed_scaling_factor: 1.0, router_aux_loss_coef: 0.001,
            num_nextn_predict_layers: 0, rope_scaling: Some(sharpened(0.707))
        }
    }

    /// Kimi-K2: 1,026 billion parameters, 33 of which a token uses.
    pub fn kimi_k2() -> Self {
        sized! { Self::deepseek_v3();
            vocab_size: 163_840, first_k_dense_replace: 1, num_attention_heads: 64, n_routed_experts: 384, n_group: 1,
            topk_group: 1, routed_scaling_factor: 2.827, router_aux_loss_coef: 0.001, num_nextn_predict_layers: 0,
            max_position_embeddings: 131_072, rope_theta: 50_000.0,
            rope_scaling: Some(YarnScaling {
                beta_fast: 1.0,
                mscale: Some(1.0),
                mscale_all_dim: Some(1.0),
                ..YarnScaling::new(32.0, 4096)
            })
        }
    }

    /// Moonlight: 16 billion parameters, 3 of which a token uses. Fits eight GPUs in training.
    pub fn moonlight_16b() -> Self {
        sized! { Self::deepseek_v3();
            vocab_size: 163_840, hidden_size: 2048, intermediate_size: 11_264, moe_intermediate_size: 1408,
            num_hidden_layers: 27, first_k_dense_replace: 1, num_attention_heads: 16, q_lora_rank: None,
            n_routed_experts: 64, n_shared_experts: 2, num_experts_per_tok: 6, n_group: 1, topk_group: 1,
            routed_scaling_factor: 2.446, router_aux_loss_coef: 0.001, num_nextn_predict_layers: 0,
            max_position_embeddings: 8192, rope_theta: 50_000.0, rope_scaling: None, rms_norm_eps: 1e-5
        }
    }
}
