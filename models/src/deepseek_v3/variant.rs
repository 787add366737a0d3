//! DeepSeek-V3 and what came before it.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::hf::HfArchitecture;

/// Which of the two. They share latent attention and experts and differ in how experts are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeepSeekVariant {
    /// By sigmoids and a bias, from groups by their two best experts; modules of multi-token prediction.
    #[default]
    DeepseekV3,
    /// DeepSeek-V2: by a softmax over all experts, of which the chosen ones' share is taken, from groups by their best expert.
    DeepseekV2,
}

/// Both.
pub(super) const VARIANTS: [DeepSeekVariant; 2] = [DeepSeekVariant::DeepseekV3, DeepSeekVariant::DeepseekV2];

impl DeepSeekVariant {
    /// Hugging Face's names.
    pub(super) fn hf(self) -> HfArchitecture {
        match self {
            Self::DeepseekV3 => HfArchitecture::new("deepseek_v3", "DeepseekV3ForCausalLM"),
            Self::DeepseekV2 => HfArchitecture::new("deepseek_v2", "DeepseekV2ForCausalLM"),
        }
    }
}

/// Hugging Face's `model_type`.
impl fmt::Display for DeepSeekVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.hf().model_type)
    }
}
