//! Sizes of Phi-3 and Phi-4, after their `config.json`.

use super::config::LlamaConfig;
use super::variant::LlamaVariant;
use crate::layers::{LongRopeScaling, PairFactors, RopeScaling};
use crate::sized;

/// How much longer the waves of the 48 rotated pairs of features of Phi-4-mini are beyond 4,096 positions.
const PHI4_MINI_LONG: [[f64; 8]; 6] = [
    [1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649],
    [2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533],
    [5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651],
    [14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03],
    [32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7],
    [32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77],
];

/// Phi-3-mini with a context of 4096.
pub(super) fn phi3_mini() -> LlamaConfig {
    sized! { LlamaConfig::llama3_8b();
        variant: LlamaVariant::Phi3, vocab_size: 32_064, hidden_size: 3072, intermediate_size: 8192,
        num_key_value_heads: 32, head_dim: 96, max_position_embeddings: 4096, sliding_window: Some(2047),
        rope_theta: 10_000.0
    }
}

/// Phi-3-medium with a context of 4096.
pub(super) fn phi3_medium() -> LlamaConfig {
    sized! { phi3_mini();
        hidden_size: 5120, intermediate_size: 17_920, num_hidden_layers: 40, num_attention_heads: 40,
        num_key_value_heads: 10, head_dim: 128
    }
}

pub(super) fn phi4() -> LlamaConfig {
    sized! { phi3_mini();
        vocab_size: 100_352, hidden_size: 5120, intermediate_size: 17_920, num_hidden_layers: 40,
        num_attention_heads: 40, num_key_value_heads: 10, head_dim: 128, max_position_embeddings: 16_384,
        sliding_window: None, rope_theta: 250_000.0
    }
}

/// Phi-4-mini, which rotates three quarters of a head's features.
pub(super) fn phi4_mini() -> LlamaConfig {
    let factors = |factors: &[f64]| PairFactors::try_from(factors.to_vec()).expect("48 pairs");
    let scaling = LongRopeScaling {
        original_max_position_embeddings: 4096,
        factor: 32.0,
        short_factor: factors(&[1.0; 48]),
        long_factor: factors(PHI4_MINI_LONG.as_flattened()),
        attention_factor: None,
    };
    sized! { phi3_mini();
        vocab_size: 200_064, num_attention_heads: 24, num_key_value_heads: 8, head_dim: 128,
        max_position_embeddings: 131_072, sliding_window: Some(262_144), partial_rotary_factor: Some(0.75),
        rope_scaling: Some(RopeScaling::LongRope(scaling)), tie_word_embeddings: true
    }
}
