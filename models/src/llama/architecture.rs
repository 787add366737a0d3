//! What tells Llama's relatives apart, as data.

use backend_dist::ops::GeluKind;

use crate::hf::HfArchitecture;
use crate::hf::decoder::{LayerNames, USUAL};
use crate::layers::{Activation, NormKind, NormOver, NormPlacement};

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

pub(super) const LLAMA: Architecture = Architecture {
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

pub(super) const MISTRAL: Architecture =
    Architecture { hf: HfArchitecture::new("mistral", "MistralForCausalLM"), keys: &["sliding_window"], ..LLAMA };

/// Both count only where `use_sliding_window` is true.
const UNUSED_WINDOW: &[&str] = &["max_window_layers", "sliding_window"];

pub(super) const QWEN2: Architecture = Architecture {
    hf: HfArchitecture::new("qwen2", "Qwen2ForCausalLM"),
    keys: &["use_sliding_window", "sliding_window", "sliding_window_pattern"],
    harmless: UNUSED_WINDOW,
    attention_biases: [Bias::Always, Bias::Never],
    ..LLAMA
};

pub(super) const QWEN3: Architecture = Architecture {
    hf: HfArchitecture::new("qwen3", "Qwen3ForCausalLM"),
    keys: &["attention_bias", "use_sliding_window", "sliding_window", "sliding_window_pattern"],
    harmless: UNUSED_WINDOW,
    query_key_norm: Some(NormOver::Head),
    ..LLAMA
};

pub(super) const SMOLLM3: Architecture = Architecture {
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

/// Gemma 1, whose first published files call the tanh approximation of GeLU `gelu`, as transformers still reads them.
pub(super) const GEMMA: Architecture = Architecture {
    hf: HfArchitecture::new("gemma", "GemmaForCausalLM"),
    keys: &["attention_bias"],
    harmless: &[],
    placement: NormPlacement::Before,
    names: USUAL,
    ..GEMMA2
};

pub(super) const OLMO2: Architecture = Architecture {
    hf: HfArchitecture::new("olmo2", "Olmo2ForCausalLM"),
    keys: &["attention_bias"],
    placement: NormPlacement::After,
    query_key_norm: Some(NormOver::Projection),
    names: LayerNames { norms: ["", "post_attention_layernorm", "", "post_feedforward_layernorm"], ..USUAL },
    ..LLAMA
};

pub(super) const OLMO3: Architecture = Architecture {
    hf: HfArchitecture::new("olmo3", "Olmo3ForCausalLM"),
    keys: &["attention_bias", "sliding_window", "sliding_window_pattern", "rope_local_base_freq"],
    ..OLMO2
};

pub(super) const GEMMA2: Architecture = Architecture {
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

pub(super) const GEMMA3: Architecture = Architecture {
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

pub(super) const PHI3: Architecture = Architecture {
    hf: HfArchitecture::new("phi3", "Phi3ForCausalLM"),
    keys: &["sliding_window", "partial_rotary_factor"],
    harmless: &["auto_map", "full_attn_mod", "interpolate_factor", "original_max_position_embeddings"],
    names: LayerNames { fused_qkv: true, fused_gate_up: true, ..USUAL },
    ..LLAMA
};

pub(super) const GLM4: Architecture = Architecture {
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

/// Its `attention_bias` is that of queries, keys and values; the output projection has another key, `attention_out_bias`.
pub(super) const SEED_OSS: Architecture = Architecture {
    hf: HfArchitecture::new("seed_oss", "SeedOssForCausalLM"),
    attention_biases: [Bias::Key, Bias::Never],
    ..LLAMA
};

pub(super) const ERNIE45: Architecture = Architecture {
    hf: HfArchitecture::new("ernie4_5", "Ernie4_5ForCausalLM"),
    keys: &[],
    tied: true,
    names: LayerNames { interleaved: true, ..USUAL },
    ..LLAMA
};

pub(super) const GRANITE: Architecture = Architecture {
    hf: HfArchitecture::new("granite", "GraniteForCausalLM"),
    keys: &[
        "attention_bias",
        "mlp_bias",
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
    ],
    ..LLAMA
};
