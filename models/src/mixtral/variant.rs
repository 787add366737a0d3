//! Which of Mixtral's relatives a model is.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::hf::HfArchitecture;
use crate::layers::{RopeScaling, YarnScaling};

/// Which of the relatives. They share blocks and routing and differ in what is named here, and in how Hugging Face
/// calls them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MixtralVariant {
    /// Mixtral: every layer has experts.
    #[default]
    Mixtral,
    /// gpt-oss: attention sinks, a window in every other layer, biases everywhere, clamped SwiGLU.
    GptOss,
    /// GLM-4.5: half of the features rotated, an MLP in the first layers, then experts chosen by sigmoid scores and a
    /// bias, and a shared one.
    Glm4Moe,
    /// DeepSeek's first model with experts: an MLP in the first layers, then experts with their share of a softmax over all,
    /// and a shared one.
    #[serde(rename = "deepseek")]
    DeepSeek,
    /// OLMoE: norms of whole queries and keys, experts with their share of a softmax over all.
    Olmoe,
    /// Qwen2-MoE: biases of queries, keys and values, a gated shared expert, and some layers may have an MLP.
    Qwen2Moe,
    /// Qwen3-MoE: every query and key head is normalised before rotation, and some layers may have an MLP instead of
    /// experts.
    Qwen3Moe,
    /// Qwen3-Next: Gated DeltaNet in three of four layers, attention with a gated output in the fourth, norms of
    /// `1 + weight`, a gated shared expert.
    Qwen3Next,
}

/// All of them.
pub(super) const VARIANTS: [MixtralVariant; 8] = [
    MixtralVariant::Mixtral,
    MixtralVariant::Qwen2Moe,
    MixtralVariant::Qwen3Moe,
    MixtralVariant::Qwen3Next,
    MixtralVariant::Glm4Moe,
    MixtralVariant::Olmoe,
    MixtralVariant::DeepSeek,
    MixtralVariant::GptOss,
];

/// Hugging Face's `model_type`.
impl fmt::Display for MixtralVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.hf().model_type)
    }
}

impl MixtralVariant {
    /// Hugging Face's names.
    pub(super) fn hf(self) -> HfArchitecture {
        match self {
            Self::Mixtral => HfArchitecture::new("mixtral", "MixtralForCausalLM"),
            Self::Qwen2Moe => HfArchitecture::new("qwen2_moe", "Qwen2MoeForCausalLM"),
            Self::Qwen3Moe => HfArchitecture::new("qwen3_moe", "Qwen3MoeForCausalLM"),
            Self::Qwen3Next => HfArchitecture::new("qwen3_next", "Qwen3NextForCausalLM"),
            Self::Glm4Moe => HfArchitecture::new("glm4_moe", "Glm4MoeForCausalLM"),
            Self::Olmoe => HfArchitecture::new("olmoe", "OlmoeForCausalLM"),
            Self::DeepSeek => HfArchitecture::new("deepseek", "DeepseekForCausalLM"),
            Self::GptOss => HfArchitecture::new("gpt_oss", "GptOssForCausalLM"),
        }
    }

    /// transformers' base of the rotary frequencies.
    pub(super) fn rope_base(self) -> f64 {
        match self {
            Self::Mixtral => 1e6,
            Self::GptOss => 150_000.0,
            Self::Glm4Moe | Self::Qwen2Moe | Self::Qwen3Moe | Self::Qwen3Next | Self::Olmoe | Self::DeepSeek => 1e4,
        }
    }

    /// transformers' scaling of the rotary frequencies where `config.json` has no rotary parameters.
    pub(super) fn rope_scaling(self) -> Option<RopeScaling> {
        let yarn = YarnScaling { truncate: false, ..YarnScaling::new(32.0, 4096) };
        (self == Self::GptOss).then_some(RopeScaling::Yarn(yarn))
    }

    /// Keys of `config.json` that this relative has and that change nothing.
    pub(super) fn harmless(self) -> &'static [&'static str] {
        match self {
            // Whether transformers trains with the load-balancing loss. Here all relatives but gpt-oss do.
            Self::Mixtral => &["output_router_logits"],
            Self::GptOss => &["initial_context_length"],
            // The last two count only where `use_sliding_window` is true.
            Self::Qwen2Moe | Self::Qwen3Moe => &["output_router_logits", "max_window_layers", "sliding_window"],
            Self::Qwen3Next | Self::Glm4Moe | Self::Olmoe => &["output_router_logits"],
            // Where its code is, and how many ranks serve it.
            Self::DeepSeek => &["auto_map", "ep_size"],
        }
    }
}
