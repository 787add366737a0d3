//! Which of Llama's relatives a model is, and what tells them apart.

use std::fmt;

use backend_dist::ops::GeluKind;
use serde::{Deserialize, Serialize};

use crate::hf::HfArchitecture;
use crate::hf::decoder::{LayerNames, USUAL};
use crate::layers::{Activation, NormKind, NormOver, NormPlacement};

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
    /// Gemma 2: norms before and after, GeGLU, soft caps, a window in every other layer.
    Gemma2,
    /// Gemma 3, text: norms of query and key heads, other rotary frequencies in layers with a window.
    Gemma3,
    /// Phi-3 and 4: some features may not be rotated; files have fused projections.
    Phi3,
    /// GLM-4: norms before and after, half of the features rotated, those of neighbours with each other.
    Glm4,
}

/// All of them.
pub(super) const VARIANTS: [LlamaVariant; 10] = [
    LlamaVariant::Llama,
    LlamaVariant::Mistral,
    LlamaVariant::Qwen2,
    LlamaVariant::Qwen3,
    LlamaVariant::SmolLm3,
    LlamaVariant::Olmo2,
    LlamaVariant::Gemma2,
    LlamaVariant::Gemma3,
    LlamaVariant::Phi3,
    LlamaVariant::Glm4,
];

/// Whether a projection has a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bias {
    Always,
    Never,
    /// `attention_bias` says so.
    Key,
}

/// What a relative is, apart from its sizes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Architecture {
    /// Hugging Face's names.
    pub hf: HfArchitecture,
    /// Keys that it has and not all others have, here and in `config.json`.
    pub keys: &'static [&'static str],
    /// Keys of `config.json` that it has and that change nothing.
    pub harmless: &'static [&'static str],
    pub norm: NormKind,
    pub placement: NormPlacement,
    pub query_key_norm: Option<NormOver>,
    pub activation: Activation,
    /// Of queries, keys and values, and of the output projection.
    pub attention_biases: [Bias; 2],
    /// Embeddings are multiplied with `√hidden_size`.
    pub scaled_embedding: bool,
    /// Whether the output layer shares the embedding's weight if `config.json` does not say it.
    pub tied: bool,
    pub names: LayerNames,
}

const LLAMA: Architecture = Architecture {
    hf: HfArchitecture::new("llama", "LlamaForCausalLM"),
    keys: &["attention_bias", "mlp_bias"],
    // nanotron writes it.
    harmless: &["is_llama_config"],
    norm: NormKind::Rms,
    placement: NormPlacement::Before,
    query_key_norm: None,
    activation: Activation::SwiGlu,
    attention_biases: [Bias::Key, Bias::Key],
    scaled_embedding: false,
    tied: false,
    names: USUAL,
};

const MISTRAL: Architecture =
    Architecture { hf: HfArchitecture::new("mistral", "MistralForCausalLM"), keys: &["sliding_window"], ..LLAMA };

/// Both count only where `use_sliding_window` is true.
const UNUSED_WINDOW: &[&str] = &["max_window_layers", "sliding_window"];

const QWEN2: Architecture = Architecture {
    hf: HfArchitecture::new("qwen2", "Qwen2ForCausalLM"),
    keys: &["use_sliding_window", "sliding_window", "sliding_window_pattern"],
    harmless: UNUSED_WINDOW,
    attention_biases: [Bias::Always, Bias::Never],
    ..LLAMA
};

const QWEN3: Architecture = Architecture {
    hf: HfArchitecture::new("qwen3", "Qwen3ForCausalLM"),
    keys: &["attention_bias", "use_sliding_window", "sliding_window", "sliding_window_pattern"],
    harmless: UNUSED_WINDOW,
    query_key_norm: Some(NormOver::Head),
    ..LLAMA
};

const SMOLLM3: Architecture = Architecture {
    hf: HfArchitecture::new("smollm3", "SmolLM3ForCausalLM"),
    keys: &[
        "attention_bias",
        "mlp_bias",
        "use_sliding_window",
        "sliding_window",
        "sliding_window_pattern",
        "no_rope_layer_interval",
    ],
    harmless: UNUSED_WINDOW,
    tied: true,
    ..LLAMA
};

const OLMO2: Architecture = Architecture {
    hf: HfArchitecture::new("olmo2", "Olmo2ForCausalLM"),
    keys: &["attention_bias"],
    placement: NormPlacement::After,
    query_key_norm: Some(NormOver::Projection),
    names: LayerNames { norms: ["", "post_attention_layernorm", "", "post_feedforward_layernorm"], ..USUAL },
    ..LLAMA
};

const GEMMA2: Architecture = Architecture {
    hf: HfArchitecture::new("gemma2", "Gemma2ForCausalLM"),
    keys: &[
        "attention_bias",
        "sliding_window",
        "sliding_window_pattern",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    ],
    harmless: &["cache_implementation"],
    norm: NormKind::RmsPlusOne,
    placement: NormPlacement::Both,
    activation: Activation::GeGlu(GeluKind::Tanh),
    scaled_embedding: true,
    tied: true,
    names: LayerNames {
        norms: [
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ],
        ..USUAL
    },
    ..LLAMA
};

const GEMMA3: Architecture = Architecture {
    hf: HfArchitecture::new("gemma3_text", "Gemma3ForCausalLM"),
    keys: &[
        "attention_bias",
        "sliding_window",
        "sliding_window_pattern",
        "query_pre_attn_scalar",
        "final_logit_softcapping",
        "rope_local_base_freq",
    ],
    query_key_norm: Some(NormOver::Head),
    ..GEMMA2
};

const PHI3: Architecture = Architecture {
    hf: HfArchitecture::new("phi3", "Phi3ForCausalLM"),
    keys: &["sliding_window", "partial_rotary_factor"],
    harmless: &["auto_map", "full_attn_mod", "interpolate_factor", "original_max_position_embeddings"],
    names: LayerNames { fused_qkv: true, fused_gate_up: true, ..USUAL },
    ..LLAMA
};

const GLM4: Architecture = Architecture {
    hf: HfArchitecture::new("glm4", "Glm4ForCausalLM"),
    keys: &["attention_bias", "partial_rotary_factor"],
    placement: NormPlacement::Both,
    attention_biases: [Bias::Key, Bias::Never],
    names: LayerNames {
        norms: ["input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"],
        fused_gate_up: true,
        interleaved: true,
        ..USUAL
    },
    ..LLAMA
};

/// Hugging Face's `model_type`.
impl fmt::Display for LlamaVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.architecture().hf.model_type)
    }
}

impl LlamaVariant {
    pub(crate) fn architecture(self) -> &'static Architecture {
        match self {
            Self::Llama => &LLAMA,
            Self::Mistral => &MISTRAL,
            Self::Qwen2 => &QWEN2,
            Self::Qwen3 => &QWEN3,
            Self::SmolLm3 => &SMOLLM3,
            Self::Olmo2 => &OLMO2,
            Self::Gemma2 => &GEMMA2,
            Self::Gemma3 => &GEMMA3,
            Self::Phi3 => &PHI3,
            Self::Glm4 => &GLM4,
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
