//! The models that `verify` trains.

use clap::ValueEnum;
use models::layers::{BalanceOver, LayerPattern};
use models::{
    DeepSeekV3Config, FamilyConfig, GptConfig, LlamaConfig, LlamaVariant, Mamba2Config, MixtralConfig, MixtralVariant,
    NemotronHConfig,
};

/// The model families that can be verified.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Family {
    /// RMSNorm, rotary positions, SwiGLU, grouped queries
    Llama,
    /// Llama with a sliding window of a quarter of the sequence
    Mistral,
    /// Llama with biases of queries, keys and values
    Qwen2,
    /// Llama with norms of every query and key head
    Qwen3,
    /// Llama with a second layer, and every second, without rotary positions
    #[value(name = "smollm3")]
    SmolLm3,
    /// Norms after attention and MLP, norms of whole queries and keys
    Olmo2,
    /// Norms of 1 + weight before and after, GeGLU, soft caps, a window in every other layer, scaled embeddings
    Gemma2,
    /// The same without soft caps, with norms of every query and key head, and other frequencies in windowed layers
    Gemma3,
    /// Llama with rotary positions of half of the features, and a window
    Phi3,
    /// Norms before and after, rotary positions of half of the features, biases of queries, keys and values
    Glm4,
    /// Four experts in the place of each MLP, balance of every sequence, z-loss
    Mixtral,
    /// The same with biases of queries, keys and values, a gated shared expert, and an MLP in the first layer
    Qwen2Moe,
    /// Mixtral with norms of every query and key head, and an MLP in the first layer
    Qwen3Moe,
    /// Gated DeltaNet, then attention with a gated output and rotary positions of half of the features, in turn; four
    /// experts and a gated shared one
    Qwen3Next,
    /// Grouped queries with rotary positions of half of the features, biases of queries, keys and values and norms of every
    /// query and key head; an MLP in the first layer, then four experts in two groups, chosen by sigmoid scores and a bias,
    /// and a shared one
    Glm4Moe,
    /// Four experts with biases and clamped SwiGLU in the place of each MLP, attention sinks, a window in every other
    /// layer
    GptOss,
    /// Latent attention with YaRN, an MLP in the first layer, then eight experts in four groups, chosen by sigmoid
    /// scores and a bias, and a shared one; two modules of multi-token prediction
    #[value(name = "deepseek-v3", alias = "deepseek_v3")]
    DeepSeekV3,
    /// Mamba-2 layers without MLPs, a group of B and C for every two heads, biases, limited step sizes
    Mamba2,
    /// Mamba-2 and attention without positions in turn, each followed by an MLP with squared ReLU, all of them layers of
    /// their own; a group of B and C for every two heads
    NemotronH,
    /// The same with experts in the place of every second MLP: eight in four groups, chosen by sigmoid scores and a bias,
    /// and a shared one
    #[value(name = "nemotron-3", alias = "nemotron_3")]
    Nemotron3,
    /// LayerNorm, learned positions, GELU, biases, dropout, tied output
    Gpt,
}

/// The numbers of a [`Size`](super::flags::Size), each replaced by its flag.
pub struct Sizes {
    pub layers: usize,
    pub hidden: usize,
    pub ffn: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub vocab: usize,
    pub seq: usize,
}

/// A family's model of these sizes.
pub fn config(family: Family, sizes: &Sizes, dropout: f64) -> FamilyConfig {
    match family {
        Family::Llama => FamilyConfig::Llama(llama(sizes, LlamaVariant::Llama)),
        Family::Mistral => FamilyConfig::Llama(llama(sizes, LlamaVariant::Mistral)),
        Family::Qwen2 => FamilyConfig::Llama(llama(sizes, LlamaVariant::Qwen2)),
        Family::SmolLm3 => FamilyConfig::Llama(llama(sizes, LlamaVariant::SmolLm3)),
        Family::Olmo2 => FamilyConfig::Llama(llama(sizes, LlamaVariant::Olmo2)),
        Family::Gemma2 => FamilyConfig::Llama(llama(sizes, LlamaVariant::Gemma2)),
        Family::Gemma3 => FamilyConfig::Llama(llama(sizes, LlamaVariant::Gemma3)),
        Family::Phi3 => FamilyConfig::Llama(llama(sizes, LlamaVariant::Phi3)),
        Family::Glm4 => FamilyConfig::Llama(llama(sizes, LlamaVariant::Glm4)),
        Family::Qwen3 => FamilyConfig::Llama(llama(sizes, LlamaVariant::Qwen3)),
        Family::Mixtral => FamilyConfig::Mixtral(mixtral(sizes, MixtralVariant::Mixtral)),
        Family::Qwen2Moe => FamilyConfig::Mixtral(mixtral(sizes, MixtralVariant::Qwen2Moe)),
        Family::Qwen3Moe => FamilyConfig::Mixtral(mixtral(sizes, MixtralVariant::Qwen3Moe)),
        Family::Qwen3Next => FamilyConfig::Mixtral(qwen3_next(sizes)),
        Family::Glm4Moe => FamilyConfig::Mixtral(glm4_moe(sizes)),
        Family::GptOss => FamilyConfig::Mixtral(mixtral(sizes, MixtralVariant::GptOss)),
        Family::DeepSeekV3 => FamilyConfig::DeepSeekV3(deepseek_v3(sizes)),
        Family::Mamba2 => FamilyConfig::Mamba2(mamba2(sizes, dropout)),
        Family::NemotronH => FamilyConfig::NemotronH(nemotron_h(sizes, dropout)),
        Family::Nemotron3 => FamilyConfig::NemotronH(nemotron_3(sizes, dropout)),
        Family::Gpt => FamilyConfig::Gpt(gpt(sizes, dropout)),
    }
}

fn llama(sizes: &Sizes, variant: LlamaVariant) -> LlamaConfig {
    use LlamaVariant::{Gemma2, Gemma3, Glm4, Mistral, Phi3, SmolLm3};
    let gemma = matches!(variant, Gemma2 | Gemma3);
    LlamaConfig {
        variant,
        sliding_window: matches!(variant, Mistral | Gemma2 | Gemma3 | Phi3).then_some((sizes.seq / 4).max(1)),
        sliding_window_pattern: gemma.then_some(LayerPattern::Every(2)),
        no_rope_layer_interval: (variant == SmolLm3).then_some(LayerPattern::Every(2)),
        partial_rotary_factor: matches!(variant, Phi3 | Glm4).then_some(0.5),
        rope_local_base_freq: (variant == Gemma3).then_some(1000.0),
        query_pre_attn_scalar: gemma.then_some(24.0),
        attn_logit_softcapping: (variant == Gemma2).then_some(2.0),
        final_logit_softcapping: (variant == Gemma2).then_some(1.0),
        attention_bias: variant == Glm4,
        tie_word_embeddings: gemma,
        vocab_size: sizes.vocab,
        hidden_size: sizes.hidden,
        intermediate_size: sizes.ffn,
        num_hidden_layers: sizes.layers,
        num_attention_heads: sizes.heads,
        num_key_value_heads: sizes.kv_heads,
        head_dim: sizes.hidden / sizes.heads.max(1),
        ..LlamaConfig::tiny()
    }
}

/// The balance over a sequence is the same in every layout; that over a micro-batch depends on its sequences.
fn mixtral(sizes: &Sizes, variant: MixtralVariant) -> MixtralConfig {
    let is_qwen = matches!(variant, MixtralVariant::Qwen2Moe | MixtralVariant::Qwen3Moe);
    let is_gpt_oss = variant == MixtralVariant::GptOss;
    MixtralConfig {
        variant,
        vocab_size: sizes.vocab,
        hidden_size: sizes.hidden,
        intermediate_size: sizes.ffn,
        moe_intermediate_size: is_qwen.then_some(sizes.ffn / 2),
        mlp_only_layers: if is_qwen { vec![0] } else { Vec::new() },
        sliding_window: is_gpt_oss.then_some((sizes.seq / 4).max(1)),
        sliding_window_pattern: is_gpt_oss.then_some(LayerPattern::Every(2)),
        swiglu_limit: is_gpt_oss.then(|| clamp_limit(sizes.hidden)),
        attention_bias: is_gpt_oss,
        router_balance: BalanceOver::Sequence,
        router_z_loss_coef: 0.001,
        num_hidden_layers: sizes.layers,
        num_attention_heads: sizes.heads,
        num_key_value_heads: sizes.kv_heads,
        head_dim: sizes.hidden / sizes.heads.max(1),
        ..MixtralConfig::tiny()
    }
}

/// Three standard deviations of what an expert of gpt-oss clamps: normalised features times weights of deviation 0.02.
///
/// A clamp's derivative jumps at the limit: an element that rounding to bf16 moves across it has a gradient on one side and
/// none on the other, in every implementation. At 0.3 deviations that is an error of 12 % of an expert's gradient; at three
/// it is within the bound, and a missing clamp beyond it (docs/measurements.md).
fn clamp_limit(hidden: usize) -> f64 {
    3.0 * 0.02 * (hidden as f64).sqrt()
}

/// As many key heads of linear attention as query heads, each of which serves two value heads.
fn qwen3_next(sizes: &Sizes) -> MixtralConfig {
    let head_dim = sizes.hidden / sizes.heads.max(1);
    MixtralConfig {
        moe_intermediate_size: Some(sizes.ffn / 2),
        shared_expert_intermediate_size: Some(sizes.ffn / 2),
        partial_rotary_factor: Some(0.5),
        full_attention_interval: Some(LayerPattern::Every(2)),
        linear_num_key_heads: Some(sizes.heads),
        linear_num_value_heads: Some(2 * sizes.heads),
        linear_key_head_dim: Some(head_dim),
        linear_value_head_dim: Some(head_dim),
        ..mixtral(sizes, MixtralVariant::Qwen3Next)
    }
}

fn glm4_moe(sizes: &Sizes) -> MixtralConfig {
    MixtralConfig {
        moe_intermediate_size: Some(sizes.ffn / 2),
        first_k_dense_replace: 1,
        n_group: 2,
        topk_group: 1,
        routed_scaling_factor: 2.5,
        moe_router_bias_update_rate: Some(0.01),
        attention_bias: true,
        use_qk_norm: true,
        ..mixtral(sizes, MixtralVariant::Glm4Moe)
    }
}

/// Heads have DeepSeek-V3's proportions: two parts that are not rotated, one that is, and values of two.
fn deepseek_v3(sizes: &Sizes) -> DeepSeekV3Config {
    let part = sizes.hidden / sizes.heads.max(1);
    models::sized! { DeepSeekV3Config::tiny();
        vocab_size: sizes.vocab, hidden_size: sizes.hidden, intermediate_size: sizes.ffn,
        moe_intermediate_size: sizes.ffn / 2, num_hidden_layers: sizes.layers, num_attention_heads: sizes.heads,
        q_lora_rank: Some(sizes.hidden / 2), kv_lora_rank: sizes.hidden / 2, qk_nope_head_dim: 2 * part,
        qk_rope_head_dim: part, v_head_dim: 2 * part, moe_router_bias_update_rate: 0.01, router_aux_loss_coef: 0.01,
        router_balance: BalanceOver::Sequence, num_nextn_predict_layers: 2, mtp_loss_scaling_factor: 0.5
    }
}

/// Heads are twice as wide together as the residual stream. A group has two heads.
fn mamba2(sizes: &Sizes, dropout: f64) -> Mamba2Config {
    Mamba2Config {
        vocab_size: sizes.vocab,
        hidden_size: sizes.hidden,
        num_hidden_layers: sizes.layers,
        num_heads: sizes.heads,
        head_dim: 2 * sizes.hidden / sizes.heads.max(1),
        state_size: 16,
        n_groups: (sizes.heads / 2).max(1),
        use_bias: true,
        time_step_limit_min: 0.002,
        time_step_limit_max: Some(0.09),
        initializer_range: 0.2,
        hidden_dropout: dropout,
        ..Mamba2Config::tiny()
    }
}

/// A layer of the other families is two, a mixer and an MLP. Heads of Mamba-2 are as many as of attention.
fn nemotron_h(sizes: &Sizes, dropout: f64) -> NemotronHConfig {
    let head_dim = sizes.hidden / sizes.heads.max(1);
    NemotronHConfig {
        vocab_size: sizes.vocab,
        hidden_size: sizes.hidden,
        hybrid_override_pattern: "M-*-".chars().cycle().take(2 * sizes.layers).collect(),
        num_attention_heads: sizes.heads,
        num_key_value_heads: sizes.kv_heads,
        head_dim,
        intermediate_size: sizes.ffn,
        mamba_num_heads: sizes.heads,
        mamba_head_dim: 2 * head_dim,
        n_groups: (sizes.heads / 2).max(1),
        initializer_range: 0.2,
        hidden_dropout: dropout,
        attention_dropout: dropout,
        ..NemotronHConfig::tiny()
    }
}

fn nemotron_3(sizes: &Sizes, dropout: f64) -> NemotronHConfig {
    NemotronHConfig {
        hybrid_override_pattern: "M-*EME*E".chars().cycle().take(2 * sizes.layers).collect(),
        moe_intermediate_size: sizes.ffn / 2,
        moe_shared_expert_intermediate_size: sizes.ffn / 2,
        moe_router_bias_update_rate: 0.01,
        router_aux_loss_coef: 0.01,
        ..nemotron_h(sizes, dropout)
    }
}

fn gpt(sizes: &Sizes, dropout: f64) -> GptConfig {
    models::sized! { GptConfig::tiny();
        vocab_size: sizes.vocab, max_position_embeddings: sizes.seq, hidden_size: sizes.hidden,
        intermediate_size: sizes.ffn, num_hidden_layers: sizes.layers, num_attention_heads: sizes.heads,
        hidden_dropout: dropout, attention_dropout: dropout
    }
}
