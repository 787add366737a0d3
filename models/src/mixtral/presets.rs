//! Known sizes.

use super::config::MixtralConfig;
use super::variant::MixtralVariant;
use crate::layers::{BalanceOver, Dispatcher, LayerPattern};
use crate::sized;

/// [`MixtralConfig::tiny`].
impl Default for MixtralConfig {
    fn default() -> Self {
        Self::tiny()
    }
}

impl MixtralConfig {
    /// All presets by name, small ones for tests first.
    pub(super) fn by_name() -> Vec<(&'static str, Self)> {
        vec![
            ("mixtral-tiny", Self::tiny()),
            ("qwen3-next-tiny", Self::qwen3_next_tiny()),
            ("mixtral-8x7b", Self::mixtral_8x7b()),
            ("mixtral-8x7b-half", Self::mixtral_8x7b_half()),
            ("mixtral-8x22b", Self::mixtral_8x22b()),
            ("qwen1.5-moe-a2.7b", Self::qwen1_5_moe_a2_7b()),
            ("qwen3-30b-a3b", Self::qwen3_30b_a3b()),
            ("qwen3-235b-a22b", Self::qwen3_235b_a22b()),
            ("qwen3-next-80b-a3b", Self::qwen3_next_80b_a3b()),
            ("gpt-oss-20b", Self::gpt_oss_20b()),
            ("gpt-oss-120b", Self::gpt_oss_120b()),
            ("glm-4.5-air", Self::glm4_5_air()),
            ("glm-4.5", Self::glm4_5()),
            ("olmoe-1b-7b", Self::olmoe_1b_7b()),
            ("deepseek-moe-16b", Self::deepseek_moe_16b()),
        ]
    }

    /// Small enough for tests: 0.2 million parameters, four experts of which a token uses two.
    pub fn tiny() -> Self {
        Self {
            variant: MixtralVariant::Mixtral,
            vocab_size: 256,
            hidden_size: 64,
            intermediate_size: 64,
            moe_intermediate_size: None,
            shared_expert_intermediate_size: None,
            num_hidden_layers: 2,
            num_attention_heads: 8,
            num_key_value_heads: 4,
            head_dim: 8,
            num_experts: 4,
            num_experts_per_tok: 2,
            norm_topk_prob: true,
            decoder_sparse_step: 1,
            mlp_only_layers: Vec::new(),
            first_k_dense_replace: 0,
            n_group: 1,
            topk_group: 1,
            routed_scaling_factor: 1.0,
            moe_router_bias_update_rate: None,
            router_aux_loss_coef: 0.01,
            router_balance: BalanceOver::MicroBatch,
            router_z_loss_coef: 0.0,
            moe_capacity: None,
            moe_dispatcher: Dispatcher::AllToAll,
            num_nextn_predict_layers: 0,
            mtp_loss_scaling_factor: None,
            sliding_window: None,
            sliding_window_pattern: None,
            swiglu_limit: None,
            partial_rotary_factor: None,
            full_attention_interval: None,
            linear_num_key_heads: None,
            linear_num_value_heads: None,
            linear_key_head_dim: None,
            linear_value_head_dim: None,
            linear_conv_kernel_dim: None,
            max_position_embeddings: 2048,
            rope_theta: 10_000.0,
            rope_scaling: None,
            rms_norm_eps: 1e-5,
            tie_word_embeddings: false,
            attention_bias: false,
            use_qk_norm: false,
            initializer_range: 0.02,
            hidden_dropout: 0.0,
            attention_dropout: 0.0,
            make_vocab_size_divisible_by: 1,
        }
    }

    /// Qwen1.5-MoE-A2.7B, a Qwen2-MoE.
    pub fn qwen1_5_moe_a2_7b() -> Self {
        sized! { Self::tiny();
            variant: MixtralVariant::Qwen2Moe, vocab_size: 151_936, hidden_size: 2048, intermediate_size: 5632,
            moe_intermediate_size: Some(1408), num_hidden_layers: 24, num_attention_heads: 16, num_key_value_heads: 16,
            head_dim: 128, num_experts: 60, num_experts_per_tok: 4, norm_topk_prob: false, router_aux_loss_coef: 0.001,
            max_position_embeddings: 8192, rope_theta: 1_000_000.0, rms_norm_eps: 1e-6,
            make_vocab_size_divisible_by: 128
        }
    }

    /// A Qwen3-Next small enough for tests: a layer of Gated DeltaNet, then one of attention, then one of Gated DeltaNet.
    pub fn qwen3_next_tiny() -> Self {
        sized! { Self::tiny();
            variant: MixtralVariant::Qwen3Next, moe_intermediate_size: Some(32),
            shared_expert_intermediate_size: Some(32), num_hidden_layers: 3, head_dim: 16,
            partial_rotary_factor: Some(0.5), full_attention_interval: Some(LayerPattern::Every(2)), linear_num_key_heads: Some(4),
            linear_num_value_heads: Some(8), linear_key_head_dim: Some(8), linear_value_head_dim: Some(8),
            linear_conv_kernel_dim: Some(4)
        }
    }

    /// Qwen3-Next-80B-A3B, without its module of multi-token prediction.
    pub fn qwen3_next_80b_a3b() -> Self {
        sized! { Self::tiny();
            variant: MixtralVariant::Qwen3Next, vocab_size: 151_936, hidden_size: 2048, intermediate_size: 5120,
            moe_intermediate_size: Some(512), shared_expert_intermediate_size: Some(512), num_hidden_layers: 48,
            num_attention_heads: 16, num_key_value_heads: 2, head_dim: 256, partial_rotary_factor: Some(0.25),
            full_attention_interval: Some(LayerPattern::Every(4)), linear_num_key_heads: Some(16), linear_num_value_heads: Some(32),
            linear_key_head_dim: Some(128), linear_value_head_dim: Some(128), linear_conv_kernel_dim: Some(4),
            num_experts: 512, num_experts_per_tok: 10, router_aux_loss_coef: 0.001, max_position_embeddings: 262_144,
            rope_theta: 10_000_000.0, rms_norm_eps: 1e-6, make_vocab_size_divisible_by: 128
        }
    }

    /// gpt-oss of 21 billion parameters.
    pub fn gpt_oss_20b() -> Self {
        sized! { Self::tiny();
            variant: MixtralVariant::GptOss, vocab_size: 201_088, hidden_size: 2880, intermediate_size: 2880,
            num_hidden_layers: 24, num_attention_heads: 64, num_key_value_heads: 8, head_dim: 64, num_experts: 32,
            num_experts_per_tok: 4, router_aux_loss_coef: 0.0, sliding_window: Some(128),
            sliding_window_pattern: Some(LayerPattern::Every(2)), max_position_embeddings: 131_072, rope_theta: 150_000.0,
            rope_scaling: MixtralVariant::GptOss.rope_scaling(), attention_bias: true, make_vocab_size_divisible_by: 128
        }
    }

    /// gpt-oss of 117 billion parameters.
    pub fn gpt_oss_120b() -> Self {
        Self { num_hidden_layers: 36, num_experts: 128, ..Self::gpt_oss_20b() }
    }

    /// GLM-4.5-Air: 107 billion parameters, of which a token uses 12, without its module of multi-token prediction.
    pub fn glm4_5_air() -> Self {
        sized! { Self::tiny();
            variant: MixtralVariant::Glm4Moe, vocab_size: 151_552, hidden_size: 4096, intermediate_size: 10_944,
            moe_intermediate_size: Some(1408), shared_expert_intermediate_size: Some(1408), num_hidden_layers: 46,
            first_k_dense_replace: 1, num_attention_heads: 96, num_key_value_heads: 8, head_dim: 128,
            partial_rotary_factor: Some(0.5), num_experts: 128, num_experts_per_tok: 8, router_aux_loss_coef: 0.0001,
            router_balance: BalanceOver::Sequence, max_position_embeddings: 131_072, rope_theta: 1_000_000.0,
            attention_bias: true, make_vocab_size_divisible_by: 128
        }
    }

    /// GLM-4.5: 353 billion parameters, of which a token uses 32, without its module of multi-token prediction.
    pub fn glm4_5() -> Self {
        sized! { Self::glm4_5_air();
            hidden_size: 5120, intermediate_size: 12_288, moe_intermediate_size: Some(1536),
            shared_expert_intermediate_size: Some(1536), num_hidden_layers: 92, first_k_dense_replace: 3,
            num_experts: 160, routed_scaling_factor: 2.5, use_qk_norm: true
        }
    }

    /// OLMoE: 6.9 billion parameters, of which a token uses 1.3.
    pub fn olmoe_1b_7b() -> Self {
        sized! { Self::tiny();
            variant: MixtralVariant::Olmoe, vocab_size: 50_304, hidden_size: 2048, intermediate_size: 1024,
            num_hidden_layers: 16, num_attention_heads: 16, num_key_value_heads: 16, head_dim: 128, num_experts: 64,
            num_experts_per_tok: 8, norm_topk_prob: false, max_position_embeddings: 4096,
            make_vocab_size_divisible_by: 128
        }
    }

    /// DeepSeek's first model with experts: 16 billion parameters, of which a token uses 2.8.
    pub fn deepseek_moe_16b() -> Self {
        sized! { Self::tiny();
            variant: MixtralVariant::DeepSeek, vocab_size: 102_400, hidden_size: 2048, intermediate_size: 10_944,
            moe_intermediate_size: Some(1408), shared_expert_intermediate_size: Some(2816), num_hidden_layers: 28,
            first_k_dense_replace: 1, num_attention_heads: 16, num_key_value_heads: 16, head_dim: 128, num_experts: 64,
            num_experts_per_tok: 6, norm_topk_prob: false, router_aux_loss_coef: 0.001,
            router_balance: BalanceOver::Sequence, max_position_embeddings: 4096, rms_norm_eps: 1e-6,
            make_vocab_size_divisible_by: 128
        }
    }

    /// Mixtral 8x7B, version 0.1.
    pub fn mixtral_8x7b() -> Self {
        sized! { Self::tiny();
            vocab_size: 32_000, hidden_size: 4096, intermediate_size: 14_336, num_hidden_layers: 32,
            num_attention_heads: 32, num_key_value_heads: 8, head_dim: 128, num_experts: 8, router_aux_loss_coef: 0.02,
            max_position_embeddings: 32_768, rope_theta: 1_000_000.0, make_vocab_size_divisible_by: 128
        }
    }

    /// Mixtral 8x7B reduced to 23.5 of 46.7 billion parameters, which eight GPUs of 141 GB can train with AdamW: half
    /// the layers.
    pub fn mixtral_8x7b_half() -> Self {
        Self { num_hidden_layers: 16, ..Self::mixtral_8x7b() }
    }

    /// Mixtral 8x22B, version 0.1: 141 billion parameters, of which a token uses 39.
    pub fn mixtral_8x22b() -> Self {
        sized! { Self::mixtral_8x7b();
            hidden_size: 6144, intermediate_size: 16_384, num_hidden_layers: 56, num_attention_heads: 48,
            router_aux_loss_coef: 0.001, max_position_embeddings: 65_536
        }
    }

    /// Qwen3 with 30 billion parameters, of which a token uses 3 billion.
    pub fn qwen3_30b_a3b() -> Self {
        sized! { Self::mixtral_8x7b();
            variant: MixtralVariant::Qwen3Moe, vocab_size: 151_936, hidden_size: 2048, intermediate_size: 6144,
            moe_intermediate_size: Some(768), num_hidden_layers: 48, num_key_value_heads: 4, num_experts: 128,
            num_experts_per_tok: 8, router_aux_loss_coef: 0.001, max_position_embeddings: 40_960, rms_norm_eps: 1e-6
        }
    }

    /// Qwen3 with 235 billion parameters, of which a token uses 22 billion.
    pub fn qwen3_235b_a22b() -> Self {
        sized! { Self::qwen3_30b_a3b();
            hidden_size: 4096, intermediate_size: 12_288, moe_intermediate_size: Some(1536), num_hidden_layers: 94,
            num_attention_heads: 64
        }
    }
}
