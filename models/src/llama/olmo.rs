//! Sizes of OLMo 2 and 3, after their `config.json`.

use super::config::LlamaConfig;
use super::variant::LlamaVariant;
use crate::layers::{LayerPattern, RopeScaling, YarnScaling};
use crate::sized;

pub(super) fn olmo2_7b() -> LlamaConfig {
    sized! { LlamaConfig::llama3_8b();
        variant: LlamaVariant::Olmo2, vocab_size: 100_352, intermediate_size: 11_008, num_key_value_heads: 32,
        max_position_embeddings: 4096, rms_norm_eps: 1e-6
    }
}

pub(super) fn olmo2_1b() -> LlamaConfig {
    sized! { olmo2_7b();
        hidden_size: 2048, intermediate_size: 8192, num_hidden_layers: 16, num_attention_heads: 16,
        num_key_value_heads: 16
    }
}

pub(super) fn olmo2_13b() -> LlamaConfig {
    sized! { olmo2_7b();
        hidden_size: 5120, intermediate_size: 13_824, num_hidden_layers: 40, num_attention_heads: 40,
        num_key_value_heads: 40
    }
}

pub(super) fn olmo2_32b() -> LlamaConfig {
    LlamaConfig { intermediate_size: 27_648, num_hidden_layers: 64, num_key_value_heads: 8, ..olmo2_13b() }
}

pub(super) fn olmo3_7b() -> LlamaConfig {
    let scaling = YarnScaling { attention_factor: Some(1.2079441541679836), ..YarnScaling::new(8.0, 8192) };
    sized! { olmo2_7b();
        variant: LlamaVariant::Olmo3, vocab_size: 100_278, max_position_embeddings: 65_536, sliding_window: Some(4096),
        sliding_window_pattern: Some(LayerPattern::Every(4)), rope_scaling: Some(RopeScaling::Yarn(scaling))
    }
}

pub(super) fn olmo3_32b() -> LlamaConfig {
    sized! { olmo3_7b();
        hidden_size: 5120, intermediate_size: 27_648, num_hidden_layers: 64, num_attention_heads: 40,
        num_key_value_heads: 8
    }
}
