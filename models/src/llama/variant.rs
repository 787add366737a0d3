//! Which of Llama's relatives a model is.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Which of the relatives. They share the blocks and differ in what is named here, and in how Hugging Face calls them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LlamaVariant {
    /// Llama 2 and 3.
    #[default]
    Llama,
    /// Mistral: attention may have a sliding window.
    Mistral,
    /// Qwen3, dense: every query and key head is normalised before rotation.
    Qwen3,
}

/// Hugging Face's `model_type`.
impl fmt::Display for LlamaVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.model_type())
    }
}

impl LlamaVariant {
    /// Hugging Face's name.
    pub(super) fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen3 => "qwen3",
        }
    }

    /// Keys of `config.json` that this relative has and that change nothing.
    pub(super) fn harmless(self) -> &'static [&'static str] {
        match self {
            Self::Llama | Self::Mistral => &[],
            // Both count only where `use_sliding_window` is true.
            Self::Qwen3 => &["max_window_layers", "sliding_window"],
        }
    }
}
