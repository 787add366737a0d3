//! Sizes of published models of the relatives, after their `config.json`.

use super::config::LlamaConfig;
use super::variant::LlamaVariant;
use super::{gemma, olmo, phi, qwen};
use crate::layers::LayerPattern;
use crate::sized;

impl LlamaConfig {
    /// All presets by name, small ones for tests first.
    pub(super) fn by_name() -> Vec<(&'static str, Self)> {
        vec![
            ("tiny", Self::tiny()),
            ("smollm2-135m", Self::smollm2_135m()),
            ("smollm2-360m", smollm2_360m()),
            ("smollm2-1.7b", smollm2_1_7b()),
            ("tinyllama-1.1b", tinyllama_1_1b()),
            ("llama2-7b", Self::llama2_7b()),
            ("llama2-13b", Self::llama2_13b()),
            ("llama2-70b", Self::llama2_70b()),
            ("llama3-1b", Self::llama3_1b()),
            ("llama3-3b", Self::llama3_3b()),
            ("llama3-8b", Self::llama3_8b()),
            ("llama3-70b", Self::llama3_70b()),
            ("llama3.1-8b", Self::llama3_1_8b()),
            ("llama3.1-70b", Self::llama3_1_70b()),
            ("llama3.1-405b", Self::llama3_1_405b()),
            ("mistral-7b", Self::mistral_7b()),
            ("mistral-nemo-12b", mistral_nemo_12b()),
            ("mistral-small-24b", mistral_small_24b()),
            ("qwen2.5-0.5b", qwen::qwen2_5_0_5b()),
            ("qwen2.5-1.5b", qwen::qwen2_5_1_5b()),
            ("qwen2.5-3b", qwen::qwen2_5_3b()),
            ("qwen2.5-7b", qwen::qwen2_5_7b()),
            ("qwen2.5-14b", qwen::qwen2_5_14b()),
            ("qwen2.5-32b", qwen::qwen2_5_32b()),
            ("qwen2.5-72b", qwen::qwen2_5_72b()),
            ("qwen3-0.6b", Self::qwen3_0_6b()),
            ("qwen3-1.7b", qwen::qwen3_1_7b()),
            ("qwen3-4b", qwen::qwen3_4b()),
            ("qwen3-8b", qwen::qwen3_8b()),
            ("qwen3-14b", qwen::qwen3_14b()),
            ("qwen3-32b", qwen::qwen3_32b()),
            ("smollm3-3b", smollm3_3b()),
            ("olmo2-1b", olmo::olmo2_1b()),
            ("olmo2-7b", olmo::olmo2_7b()),
            ("olmo2-13b", olmo::olmo2_13b()),
            ("olmo2-32b", olmo::olmo2_32b()),
            ("olmo3-7b", olmo::olmo3_7b()),
            ("olmo3-32b", olmo::olmo3_32b()),
            ("gemma-2b", gemma::gemma_2b()),
            ("gemma-7b", gemma::gemma_7b()),
            ("gemma2-2b", gemma::gemma2_2b()),
            ("gemma2-9b", gemma::gemma2_9b()),
            ("gemma2-27b", gemma::gemma2_27b()),
            ("gemma3-270m", gemma::gemma3_270m()),
            ("gemma3-1b", gemma::gemma3_1b()),
            ("gemma3-4b", gemma::gemma3_4b()),
            ("gemma3-12b", gemma::gemma3_12b()),
            ("gemma3-27b", gemma::gemma3_27b()),
            ("phi3-mini", phi::phi3_mini()),
            ("phi3-medium", phi::phi3_medium()),
            ("phi4", phi::phi4()),
            ("phi4-mini", phi::phi4_mini()),
            ("glm4-9b", glm4_9b()),
            ("glm4-32b", glm4_32b()),
            ("seed-oss-36b", seed_oss_36b()),
            ("ernie4.5-0.3b", ernie45_0_3b()),
            ("granite3-8b", granite3_8b()),
        ]
    }
}

fn smollm2_360m() -> LlamaConfig {
    sized! { LlamaConfig::smollm2_135m();
        hidden_size: 960, intermediate_size: 2560, num_hidden_layers: 32, num_attention_heads: 15,
        num_key_value_heads: 5, initializer_range: 0.02
    }
}

fn smollm2_1_7b() -> LlamaConfig {
    sized! { smollm2_360m();
        hidden_size: 2048, intermediate_size: 8192, num_hidden_layers: 24, num_attention_heads: 32,
        num_key_value_heads: 32, rope_theta: 130_000.0
    }
}

fn tinyllama_1_1b() -> LlamaConfig {
    sized! { LlamaConfig::llama2_7b();
        hidden_size: 2048, intermediate_size: 5632, num_hidden_layers: 22, num_key_value_heads: 4, head_dim: 64,
        max_position_embeddings: 2048
    }
}

/// Mistral Nemo, with its head_dim of 128.
fn mistral_nemo_12b() -> LlamaConfig {
    sized! { LlamaConfig::mistral_7b();
        vocab_size: 131_072, hidden_size: 5120, num_hidden_layers: 40, max_position_embeddings: 131_072,
        sliding_window: None, rope_theta: 1_000_000.0
    }
}

/// Mistral Small 3.
fn mistral_small_24b() -> LlamaConfig {
    sized! { mistral_nemo_12b(); intermediate_size: 32_768, max_position_embeddings: 32_768, rope_theta: 1e8 }
}

fn smollm3_3b() -> LlamaConfig {
    sized! { LlamaConfig::llama3_8b();
        variant: LlamaVariant::SmolLm3, hidden_size: 2048, intermediate_size: 11_008, num_hidden_layers: 36,
        num_attention_heads: 16, num_key_value_heads: 4, max_position_embeddings: 65_536,
        no_rope_layer_interval: Some(LayerPattern::Every(4)), rope_theta: 5_000_000.0, rms_norm_eps: 1e-6, tie_word_embeddings: true
    }
}

/// GLM-4-9B-0414.
fn glm4_9b() -> LlamaConfig {
    sized! { LlamaConfig::llama3_8b();
        variant: LlamaVariant::Glm4, vocab_size: 151_552, intermediate_size: 13_696, num_hidden_layers: 40,
        num_key_value_heads: 2, max_position_embeddings: 32_768, partial_rotary_factor: Some(0.5),
        attention_bias: true, rope_theta: 10_000.0
    }
}

/// GLM-4-32B-0414 and GLM-Z1-32B-0414.
fn glm4_32b() -> LlamaConfig {
    sized! { glm4_9b();
        hidden_size: 6144, intermediate_size: 23_040, num_hidden_layers: 61, num_attention_heads: 48,
        attention_bias: false
    }
}

fn seed_oss_36b() -> LlamaConfig {
    sized! { LlamaConfig::llama3_8b();
        variant: LlamaVariant::SeedOss, vocab_size: 155_136, hidden_size: 5120, intermediate_size: 27_648,
        num_hidden_layers: 64, num_attention_heads: 80, max_position_embeddings: 524_288, attention_bias: true,
        rope_theta: 10_000_000.0, rms_norm_eps: 1e-6, hidden_dropout: 0.1, attention_dropout: 0.1
    }
}

fn ernie45_0_3b() -> LlamaConfig {
    sized! { LlamaConfig::llama3_8b();
        variant: LlamaVariant::Ernie45, vocab_size: 103_424, hidden_size: 1024, intermediate_size: 3072,
        num_hidden_layers: 18, num_attention_heads: 16, num_key_value_heads: 2, max_position_embeddings: 131_072,
        tie_word_embeddings: true
    }
}

/// Granite 3.3 8B.
fn granite3_8b() -> LlamaConfig {
    sized! { LlamaConfig::llama3_8b();
        variant: LlamaVariant::Granite, vocab_size: 49_159, intermediate_size: 12_800, num_hidden_layers: 40,
        max_position_embeddings: 131_072, rope_theta: 10_000_000.0, tie_word_embeddings: true,
        embedding_multiplier: Some(12.0), attention_multiplier: Some(0.0078125), residual_multiplier: Some(0.22),
        logits_scaling: Some(16.0)
    }
}
