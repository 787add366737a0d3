//! Known sizes: those of NVIDIA's own training code (Megatron-Bridge, `models/nemotronh/nemotron_h_provider.py`).

use super::config::NemotronHConfig;
use crate::sized;

/// [`NemotronHConfig::tiny`].
impl Default for NemotronHConfig {
    fn default() -> Self {
        Self::tiny()
    }
}

impl NemotronHConfig {
    /// Small enough for tests: 0.1 million parameters, each kind of layer.
    pub fn tiny() -> Self {
        Self {
            vocab_size: 256,
            hidden_size: 64,
            hybrid_override_pattern: "M-M*-M".into(),
            num_attention_heads: 8,
            num_key_value_heads: 4,
            head_dim: 8,
            intermediate_size: 128,
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

    /// All presets by name, small ones for tests first.
    pub(super) fn by_name() -> Vec<(&'static str, Self)> {
        vec![
            ("nemotron-h-tiny", Self::tiny()),
            ("nemotron-h-8b", Self::nemotron_h_8b()),
            ("nemotron-h-47b", Self::nemotron_h_47b()),
            ("nemotron-h-56b", Self::nemotron_h_56b()),
            ("nemotron-nano-9b-v2", Self::nemotron_nano_9b_v2()),
            ("nemotron-nano-12b-v2", Self::nemotron_nano_12b_v2()),
        ]
    }
}
