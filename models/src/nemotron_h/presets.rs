//! Known sizes: those of NVIDIA's own training code (Megatron-Bridge, `models/nemotronh/nemotron_h_provider.py`).

use super::config::NemotronHConfig;
use crate::layers::{BalanceOver, Dispatcher};
use crate::sized;

/// [`NemotronHConfig::tiny`].
impl Default for NemotronHConfig {
    fn default() -> Self {
        Self::tiny()
    }
}

impl NemotronHConfig {
    /// Small enough for tests: 0.1 million parameters, each kind of layer but experts.
    pub fn tiny() -> Self {
        Self {
            vocab_size: 256,
            hidden_size: 64,
            hybrid_override_pattern: "M-M*-M".into(),
            num_attention_heads: 8,
            num_key_value_heads: 4,
            head_dim: 8,
            intermediate_size: 128,
            moe_intermediate_size: 32,
            moe_shared_expert_intermediate_size: 96,
            n_routed_experts: 8,
            num_experts_per_tok: 3,
            n_group: 4,
            topk_group: 2,
            norm_topk_prob: true,
            routed_scaling_factor: 2.5,
            moe_router_bias_update_rate: 0.001,
            router_aux_loss_coef: 0.0001,
            router_balance: BalanceOver::Sequence,
            moe_capacity: None,
            moe_dispatcher: Dispatcher::AllToAll,
            mamba_num_heads: 8,
            mamba_head_dim: 16,
            ssm_state_size: 16,
            n_groups: 2,
            conv_kernel: 4,
            use_conv_bias: true,
            use_bias: false,
            mlp_bias: false,
            max_position_embeddings: 256,
            layer_norm_epsilon: 1e-5,
            tie_word_embeddings: false,
            initializer_range: 0.02,
            hidden_dropout: 0.0,
            attention_dropout: 0.0,
            make_vocab_size_divisible_by: 1,
        }
    }

    /// The same with experts and without MLPs, as Nemotron 3 has them.
    pub fn nemotron_3_tiny() -> Self {
        Self { hybrid_override_pattern: "MEM*EM".into(), ..Self::tiny() }
    }

    /// Nemotron-H-8B.
    pub fn nemotron_h_8b() -> Self {
        sized! { Self::tiny();
            vocab_size: 131_072, hidden_size: 4096,
            hybrid_override_pattern: "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-".into(),
            num_attention_heads: 32, num_key_value_heads: 8, head_dim: 128, intermediate_size: 21_504,
            mamba_num_heads: 128, mamba_head_dim: 64, ssm_state_size: 128, n_groups: 8, max_position_embeddings: 8192
        }
    }

    /// Nemotron-H-47B, pruned from the one of 56 billion.
    pub fn nemotron_h_47b() -> Self {
        Self {
            hybrid_override_pattern: [
                "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-",
                "M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-",
            ]
            .concat(),
            intermediate_size: 30_720,
            ..Self::nemotron_h_56b()
        }
    }

    /// Nemotron-H-56B.
    pub fn nemotron_h_56b() -> Self {
        let group = "M-M-M-M-M*-";
        Self {
            hidden_size: 8192,
            hybrid_override_pattern: format!("M-M-M-M*-{}M-M-M-M-M-", group.repeat(9)),
            num_attention_heads: 64,
            intermediate_size: 32_768,
            mamba_num_heads: 256,
            ssm_state_size: 256,
            ..Self::nemotron_h_8b()
        }
    }

    /// NVIDIA-Nemotron-Nano-9B-v2, pruned from the one of 12 billion.
    pub fn nemotron_nano_9b_v2() -> Self {
        Self {
            hidden_size: 4480,
            hybrid_override_pattern: "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-".into(),
            intermediate_size: 15_680,
            ..Self::nemotron_nano_12b_v2()
        }
    }

    /// NVIDIA-Nemotron-Nano-12B-v2.
    pub fn nemotron_nano_12b_v2() -> Self {
        sized! { Self::nemotron_h_8b();
            hidden_size: 5120,
            hybrid_override_pattern: "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-".into(),
            num_attention_heads: 40, intermediate_size: 20_480, mamba_head_dim: 80, max_position_embeddings: 131_072
        }
    }

    /// NVIDIA-Nemotron-3-Nano-30B-A3B, of whose 31.6 billion parameters a token uses 3.6 billion.
    pub fn nemotron_3_nano_30b_a3b() -> Self {
        sized! { Self::nemotron_h_8b();
            hidden_size: 2688,
            hybrid_override_pattern: "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME".into(),
            num_key_value_heads: 2, intermediate_size: 1856, moe_intermediate_size: 1856,
            moe_shared_expert_intermediate_size: 3712, n_routed_experts: 128, num_experts_per_tok: 6, n_group: 1,
            topk_group: 1, mamba_num_heads: 64, max_position_embeddings: 262_144
        }
    }

    /// All presets by name, small ones for tests first.
    pub(super) fn by_name() -> Vec<(&'static str, Self)> {
        vec![
            ("nemotron-h-tiny", Self::tiny()),
            ("nemotron-3-tiny", Self::nemotron_3_tiny()),
            ("nemotron-h-8b", Self::nemotron_h_8b()),
            ("nemotron-h-47b", Self::nemotron_h_47b()),
            ("nemotron-h-56b", Self::nemotron_h_56b()),
            ("nemotron-nano-9b-v2", Self::nemotron_nano_9b_v2()),
            ("nemotron-nano-12b-v2", Self::nemotron_nano_12b_v2()),
            ("nemotron-3-nano-30b-a3b", Self::nemotron_3_nano_30b_a3b()),
        ]
    }
}
