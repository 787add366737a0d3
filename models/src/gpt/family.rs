//! What others know of GPT by its name.

use serde_json::Value;

use super::config::GptConfig;
use super::hf::ARCHITECTURE;
use crate::family::{Family, Sample, SampleSizes};
use crate::hf::{HfArchitecture, HfError};
use crate::sized;

impl Family for GptConfig {
    const SIZES: &'static [(&'static str, &'static str)] = &[
        ("gelu_tanh", "Use the tanh approximation of GELU, as GPT-2 does"),
        ("bias", "Use biases in the linear layers"),
    ];

    fn architectures() -> Vec<HfArchitecture> {
        vec![ARCHITECTURE]
    }

    fn read_hf(config: &Value, _kind: &str) -> Result<Self, HfError> {
        Self::from_hf(config)
    }

    fn write_hf(&self) -> Result<Value, HfError> {
        self.to_hf()
    }

    fn samples(sizes: &SampleSizes) -> Vec<Sample<Self>> {
        let config = sized! { Self::tiny();
            vocab_size: sizes.vocab, max_position_embeddings: sizes.seq, hidden_size: sizes.hidden,
            intermediate_size: sizes.intermediate, num_hidden_layers: sizes.layers, num_attention_heads: sizes.heads,
            hidden_dropout: sizes.dropout, attention_dropout: sizes.dropout
        };
        vec![Sample::new("gpt", "LayerNorm, learned positions, GELU, biases, dropout, tied output", config)]
    }
}
