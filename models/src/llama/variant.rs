//! Which of Llama's relatives a model is; `architecture.rs` says what tells them apart.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::architecture::{self as of, Architecture};

/// Which of the relatives. They share the blocks and differ in what its architecture names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LlamaVariant {
    /// Llama 2 and 3.
    #[default]
    Llama,
    /// Mistral: attention may have a sliding window.
    Mistral,
    /// Qwen2 and 2.5, dense: biases of queries, keys and values.
    Qwen2,
    /// Qwen3, dense: every query and key head is normalised before rotation.
    Qwen3,
    /// SmolLM3: some layers do not rotate.
    SmolLm3,
    /// OLMo 2: norms after attention and MLP, and of whole queries and keys.
    Olmo2,
    /// OLMo 3: OLMo 2 with a window in three of four layers, whose rotation has no scaling.
    Olmo3,
    /// Gemma 1: norms of `1 + weight`, GeGLU, scaled embeddings.
    Gemma,
    /// Gemma 2: norms before and after, GeGLU, soft caps, a window in every other layer.
    Gemma2,
    /// Gemma 3, text: norms of query and key heads, other rotary frequencies in layers with a window.
    Gemma3,
    /// Phi-3 and 4: some features may not be rotated; files have fused projections.
    Phi3,
    /// GLM-4: norms before and after, half of the features rotated, those of neighbours with each other.
    Glm4,
    /// Seed-OSS: dropout before each residual addition, biases of queries, keys and values.
    #[serde(rename = "seed_oss")]
    SeedOss,
    /// ERNIE 4.5, dense: neighbouring features are rotated with each other.
    #[serde(rename = "ernie4_5")]
    Ernie45,
    /// Granite: factors of embeddings, scores, logits and of what is added to the residual stream.
    Granite,
}

/// All of them.
pub(super) const VARIANTS: [LlamaVariant; 15] = [
    LlamaVariant::Llama,
    LlamaVariant::Mistral,
    LlamaVariant::Qwen2,
    LlamaVariant::Qwen3,
    LlamaVariant::SmolLm3,
    LlamaVariant::Olmo2,
    LlamaVariant::Olmo3,
    LlamaVariant::Gemma,
    LlamaVariant::Gemma2,
    LlamaVariant::Gemma3,
    LlamaVariant::Phi3,
    LlamaVariant::Glm4,
    LlamaVariant::SeedOss,
    LlamaVariant::Ernie45,
    LlamaVariant::Granite,
];

/// Hugging Face's `model_type`.
impl fmt::Display for LlamaVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.architecture().hf.model_type)
    }
}

impl LlamaVariant {
    pub(crate) fn architecture(self) -> &'static Architecture {
        match self {
            Self::Llama => &of::LLAMA,
            Self::Mistral => &of::MISTRAL,
            Self::Qwen2 => &of::QWEN2,
            Self::Qwen3 => &of::QWEN3,
            Self::SmolLm3 => &of::SMOLLM3,
            Self::Olmo2 => &of::OLMO2,
            Self::Olmo3 => &of::OLMO3,
            Self::Gemma => &of::GEMMA,
            Self::Gemma2 => &of::GEMMA2,
            Self::Gemma3 => &of::GEMMA3,
            Self::Phi3 => &of::PHI3,
            Self::Glm4 => &of::GLM4,
            Self::SeedOss => &of::SEED_OSS,
            Self::Ernie45 => &of::ERNIE45,
            Self::Granite => &of::GRANITE,
        }
    }

    /// Whether the relative has a key that not all have.
    pub(super) fn has(self, key: &str) -> bool {
        self.architecture().keys.contains(&key)
    }

    /// transformers' number for a key that `config.json` does not have, where it has one.
    pub(super) fn absent(self, key: &str) -> Option<f64> {
        match (self, key) {
            (Self::Gemma2 | Self::Gemma3, "query_pre_attn_scalar") => Some(256.0),
            (Self::Gemma2, "attn_logit_softcapping") => Some(50.0),
            (Self::Gemma2, "final_logit_softcapping") => Some(30.0),
            (Self::Granite, _) => Some(1.0),
            _ => None,
        }
    }

    /// The relatives that have a key, in words.
    pub(super) fn owners(key: &str) -> String {
        let mut owners: Vec<String> =
            VARIANTS.into_iter().filter(|variant| variant.has(key)).map(|variant| variant.to_string()).collect();
        match owners.pop() {
            Some(last) if owners.is_empty() => format!("models of {last}"),
            Some(last) => format!("{} and {last}", owners.join(", ")),
            None => "no models".into(),
        }
    }
}
