//! Sizes of Qwen2.5 and Qwen3, after their `config.json`.

use super::config::LlamaConfig;
use super::variant::LlamaVariant;
use crate::sized;

pub(super) fn qwen2_5_0_5b() -> LlamaConfig {
    sized! { LlamaConfig::llama3_8b();
        variant: LlamaVariant::Qwen2, vocab_size: 151_936, hidden_size: 896, intermediate_size: 4864,
        num_hidden_layers: 24, num_attention_heads: 14, num_key_value_heads: 2, head_dim: 64,
        max_position_embeddings: 32_768, rope_theta: 1_000_000.0, rms_norm_eps: 1e-6, tie_word_embeddings: true
    }
}

pub(super) fn qwen2_5_1_5b() -> LlamaConfig {
    sized! { qwen2_5_0_5b();
        hidden_size: 1536, intermediate_size: 8960, num_hidden_layers: 28, num_attention_heads: 12, head_dim: 128,
        max_position_embeddings: 131_072
    }
}

pub(super) fn qwen2_5_3b() -> LlamaConfig {
    sized! { qwen2_5_0_5b();
        hidden_size: 2048, intermediate_size: 11_008, num_hidden_layers: 36, num_attention_heads: 16, head_dim: 128
    }
}

pub(super) fn qwen2_5_7b() -> LlamaConfig {
    sized! { qwen2_5_0_5b();
        vocab_size: 152_064, hidden_size: 3584, intermediate_size: 18_944, num_hidden_layers: 28,
        num_attention_heads: 28, num_key_value_heads: 4, head_dim: 128, max_position_embeddings: 131_072,
        tie_word_embeddings: false
    }
}

pub(super) fn qwen2_5_14b() -> LlamaConfig {
    sized! { qwen2_5_7b();
        hidden_size: 5120, intermediate_size: 13_824, num_hidden_layers: 48, num_attention_heads: 40,
        num_key_value_heads: 8, rms_norm_eps: 1e-5
    }
}

pub(super) fn qwen2_5_32b() -> LlamaConfig {
    LlamaConfig { intermediate_size: 27_648, num_hidden_layers: 64, ..qwen2_5_14b() }
}

pub(super) fn qwen2_5_72b() -> LlamaConfig {
    sized! { qwen2_5_7b();
        hidden_size: 8192, intermediate_size: 29_568, num_hidden_layers: 80, num_attention_heads: 64,
        num_key_value_heads: 8, rms_norm_eps: 1e-5
    }
}

pub(super) fn qwen3_1_7b() -> LlamaConfig {
    LlamaConfig { hidden_size: 2048, intermediate_size: 6144, ..LlamaConfig::qwen3_0_6b() }
}

pub(super) fn qwen3_4b() -> LlamaConfig {
    sized! { LlamaConfig::qwen3_0_6b();
        hidden_size: 2560, intermediate_size: 9728, num_hidden_layers: 36, num_attention_heads: 32
    }
}

pub(super) fn qwen3_8b() -> LlamaConfig {
    LlamaConfig { hidden_size: 4096, intermediate_size: 12_288, tie_word_embeddings: false, ..qwen3_4b() }
}

pub(super) fn qwen3_14b() -> LlamaConfig {
    sized! { qwen3_8b();
        hidden_size: 5120, intermediate_size: 17_408, num_hidden_layers: 40, num_attention_heads: 40
    }
}

pub(super) fn qwen3_32b() -> LlamaConfig {
    sized! { qwen3_8b();
        hidden_size: 5120, intermediate_size: 25_600, num_hidden_layers: 64, num_attention_heads: 64
    }
}
