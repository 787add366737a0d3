//! Sizes of Gemma 1, 2 and 3, after their `config.json`.

use super::config::LlamaConfig;
use super::variant::LlamaVariant;
use crate::layers::{LayerPattern, LinearScaling, RopeScaling};
use crate::sized;

pub(super) fn gemma_2b() -> LlamaConfig {
    sized! { LlamaConfig::llama3_8b();
        variant: LlamaVariant::Gemma, vocab_size: 256_000, hidden_size: 2048, intermediate_size: 16_384,
        num_hidden_layers: 18, num_attention_heads: 8, num_key_value_heads: 1, head_dim: 256, rope_theta: 10_000.0,
        rms_norm_eps: 1e-6, tie_word_embeddings: true
    }
}

pub(super) fn gemma_7b() -> LlamaConfig {
    sized! { gemma_2b();
        hidden_size: 3072, intermediate_size: 24_576, num_hidden_layers: 28, num_attention_heads: 16,
        num_key_value_heads: 16
    }
}

pub(super) fn gemma2_2b() -> LlamaConfig {
    sized! { LlamaConfig::llama3_8b();
        variant: LlamaVariant::Gemma2, vocab_size: 256_000, hidden_size: 2304, intermediate_size: 9216,
        num_hidden_layers: 26, num_attention_heads: 8, num_key_value_heads: 4, head_dim: 256,
        sliding_window: Some(4096), sliding_window_pattern: Some(LayerPattern::Every(2)), query_pre_attn_scalar: Some(256.0),
        attn_logit_softcapping: Some(50.0), final_logit_softcapping: Some(30.0), rope_theta: 10_000.0,
        rms_norm_eps: 1e-6, tie_word_embeddings: true
    }
}

pub(super) fn gemma2_9b() -> LlamaConfig {
    sized! { gemma2_2b();
        hidden_size: 3584, intermediate_size: 14_336, num_hidden_layers: 42, num_attention_heads: 16,
        num_key_value_heads: 8
    }
}

pub(super) fn gemma2_27b() -> LlamaConfig {
    sized! { gemma2_2b();
        hidden_size: 4608, intermediate_size: 36_864, num_hidden_layers: 46, num_attention_heads: 32,
        num_key_value_heads: 16, head_dim: 128, query_pre_attn_scalar: Some(144.0)
    }
}

pub(super) fn gemma3_1b() -> LlamaConfig {
    sized! { gemma2_2b();
        variant: LlamaVariant::Gemma3, vocab_size: 262_144, hidden_size: 1152, intermediate_size: 6912,
        num_attention_heads: 4, num_key_value_heads: 1, max_position_embeddings: 32_768, sliding_window: Some(512),
        sliding_window_pattern: Some(LayerPattern::Every(6)), rope_theta: 1_000_000.0, rope_local_base_freq: Some(10_000.0),
        attn_logit_softcapping: None, final_logit_softcapping: None
    }
}

pub(super) fn gemma3_270m() -> LlamaConfig {
    LlamaConfig { hidden_size: 640, intermediate_size: 2048, num_hidden_layers: 18, ..gemma3_1b() }
}

/// The language model of the 4 billion parameters, without its images, as those of 12 and 27.
pub(super) fn gemma3_4b() -> LlamaConfig {
    sized! { gemma3_1b();
        vocab_size: 262_208, hidden_size: 2560, intermediate_size: 10_240, num_hidden_layers: 34,
        num_attention_heads: 8, num_key_value_heads: 4, max_position_embeddings: 131_072, sliding_window: Some(1024),
        rope_scaling: Some(RopeScaling::Linear(LinearScaling { factor: 8.0 }))
    }
}

pub(super) fn gemma3_12b() -> LlamaConfig {
    sized! { gemma3_4b();
        hidden_size: 3840, intermediate_size: 15_360, num_hidden_layers: 48, num_attention_heads: 16,
        num_key_value_heads: 8
    }
}

pub(super) fn gemma3_27b() -> LlamaConfig {
    sized! { gemma3_4b();
        hidden_size: 5376, intermediate_size: 21_504, num_hidden_layers: 62, num_attention_heads: 32,
        num_key_value_heads: 16, head_dim: 128, query_pre_attn_scalar: Some(168.0)
    }
}
