//! Known sizes.

use super::config::LlamaConfig;
use super::variant::LlamaVariant;
use crate::layers::{Llama3Scaling, RopeScaling};
use crate::sized;

/// What Llama 3.1 and 3.2 make of the context of 3.
fn longer(factor: f64) -> RopeScaling {
    RopeScaling::Llama3(Llama3Scaling {
        factor,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    })
}

/// [`LlamaConfig::tiny`].
impl Default for LlamaConfig {
    fn default() -> Self {
        Self::tiny()
    }
}

impl LlamaConfig {
    /// Small enough for tests: 0.1 million parameters, every feature of a Llama 3 except the scaling.
    pub fn tiny() -> Self {
        Self {
            variant: LlamaVariant::Llama,
            vocab_size: 256,
            hidden_size: 64,
            intermediate_size: 128,
            num_hidden_layers: 2,
            num_attention_heads: 8,
            num_key_value_heads: 4,
            head_dim: 8,
            max_position_embeddings: 2048,
            sliding_window: None,
            sliding_window_pattern: None,
            no_rope_layer_interval: None,
            partial_rotary_factor: None,
            rope_local_base_freq: None,
            query_pre_attn_scalar: None,
            attn_logit_softcapping: None,
            final_logit_softcapping: None,
            embedding_multiplier: None,
            attention_multiplier: None,
            residual_multiplier: None,
            logits_scaling: None,
            rope_theta: 10_000.0,
            rope_scaling: None,
            rms_norm_eps: 1e-5,
            tie_word_embeddings: false,
            attention_bias: false,
            mlp_bias: false,
            initializer_range: 0.02,
            hidden_dropout: 0.0,
            attention_dropout: 0.0,
            make_vocab_size_divisible_by: 1,
        }
    }

    /// Llama 3 8B.
    pub fn llama3_8b() -> Self {
        sized! { Self::tiny();
            vocab_size: 128_256, hidden_size: 4096, intermediate_size: 14_336, num_hidden_layers: 32,
            num_attention_heads: 32, num_key_value_heads: 8, head_dim: 128, max_position_embeddings: 8192,
            rope_theta: 500_000.0, make_vocab_size_divisible_by: 128
        }
    }

    /// Llama 2 7B.
    pub fn llama2_7b() -> Self {
        sized! { Self::llama3_8b();
            vocab_size: 32_000, intermediate_size: 11_008, num_key_value_heads: 32, max_position_embeddings: 4096,
            rope_theta: 10_000.0
        }
    }

    /// Llama 2 13B.
    pub fn llama2_13b() -> Self {
        sized! { Self::llama2_7b();
            hidden_size: 5120, intermediate_size: 13_824, num_hidden_layers: 40, num_attention_heads: 40,
            num_key_value_heads: 40
        }
    }

    /// Llama 2 70B.
    pub fn llama2_70b() -> Self {
        sized! { Self::llama3_70b(); vocab_size: 32_000, max_position_embeddings: 4096, rope_theta: 10_000.0 }
    }

    /// Llama 3.1 8B: Llama 3 with a longer context.
    pub fn llama3_1_8b() -> Self {
        Self { max_position_embeddings: 131_072, rope_scaling: Some(longer(8.0)), ..Self::llama3_8b() }
    }

    /// Llama 3.1 and 3.3 70B.
    pub fn llama3_1_70b() -> Self {
        Self { max_position_embeddings: 131_072, rope_scaling: Some(longer(8.0)), ..Self::llama3_70b() }
    }

    /// Llama 3.1 405B.
    pub fn llama3_1_405b() -> Self {
        sized! { Self::llama3_1_70b();
            hidden_size: 16_384, intermediate_size: 53_248, num_hidden_layers: 126, num_attention_heads: 128
        }
    }

    /// Llama 3.2 1B.
    pub fn llama3_1b() -> Self {
        sized! { Self::llama3_8b();
            hidden_size: 2048, intermediate_size: 8192, num_hidden_layers: 16, head_dim: 64,
            max_position_embeddings: 131_072,
            rope_scaling: Some(longer(32.0)),
            tie_word_embeddings: true
        }
    }

    /// Llama 3.2 3B.
    pub fn llama3_3b() -> Self {
        Self { hidden_size: 3072, num_hidden_layers: 28, num_attention_heads: 24, head_dim: 128, ..Self::llama3_1b() }
    }

    /// Mistral 7B, version 0.1.
    pub fn mistral_7b() -> Self {
        sized! { Self::llama3_8b();
            variant: LlamaVariant::Mistral, vocab_size: 32_000, max_position_embeddings: 32_768,
            sliding_window: Some(4096), rope_theta: 10_000.0
        }
    }

    /// Qwen3 with 0.6 billion parameters.
    pub fn qwen3_0_6b() -> Self {
        sized! { Self::llama3_8b();
            variant: LlamaVariant::Qwen3, vocab_size: 151_936, hidden_size: 1024, intermediate_size: 3072,
            num_hidden_layers: 28, num_attention_heads: 16, max_position_embeddings: 40_960, rope_theta: 1_000_000.0,
            rms_norm_eps: 1e-6, tie_word_embeddings: true
        }
    }

    /// SmolLM2 with 135 million parameters.
    pub fn smollm2_135m() -> Self {
        sized! { Self::llama3_8b();
            vocab_size: 49_152, hidden_size: 576, intermediate_size: 1536, num_hidden_layers: 30,
            num_attention_heads: 9, num_key_value_heads: 3, head_dim: 64, rope_theta: 100_000.0,
            tie_word_embeddings: true, initializer_range: 1.0 / 24.0
        }
    }

    /// Llama 3 70B.
    pub fn llama3_70b() -> Self {
        Self {
            hidden_size: 8192,
            intermediate_size: 28_672,
            num_hidden_layers: 80,
            num_attention_heads: 64,
            ..Self::llama3_8b()
        }
    }
}
