//! What others know of Mixtral and its relatives by name.

use serde_json::Value;

use super::config::MixtralConfig;
use super::variant::{MixtralVariant, VARIANTS};
use crate::family::{Family, MegatronModel, Sample, SampleSizes};
use crate::hf::{HfArchitecture, HfError};
use crate::layers::{BalanceOver, LayerPattern};
use crate::sized;

impl Family for MixtralConfig {
    const SIZES: &'static [(&'static str, &'static str)] = &[
        (
            "full_attention_interval",
            "Layers with attention, the others have Gated DeltaNet: the last of every so many, or a list; none: 4",
        ),
        ("linear_num_key_heads", "Gated DeltaNet: number of query and key heads; none: 16"),
        ("linear_num_value_heads", "Gated DeltaNet: number of value heads; none: 32"),
        ("linear_key_head_dim", "Gated DeltaNet: query and key head dimension; none: 128"),
        ("linear_value_head_dim", "Gated DeltaNet: value head dimension; none: 128"),
        ("linear_conv_kernel_dim", "Gated DeltaNet: positions that the convolution sees; none: 4"),
        ("swiglu_limit", "Limit of the clamped SwiGLU of experts; none: 7"),
        ("use_qk_norm", "Normalise every query and key head before RoPE"),
        ("num_experts", "Number of routed experts of a layer"),
        (
            "shared_expert_intermediate_size",
            "Intermediate size of the shared expert; none: intermediate-size, in glm4_moe and deepseek moe-intermediate-size",
        ),
        ("decoder_sparse_step", "Every so many layers, one layer has experts"),
        ("mlp_only_layers", "Indices of further layers with a dense MLP instead of experts"),
        ("router_z_loss_coef", "Coefficient of the router z-loss"),
    ];

    fn architectures() -> Vec<HfArchitecture> {
        VARIANTS.map(MixtralVariant::hf).to_vec()
    }

    fn read_hf(config: &Value, kind: &str) -> Result<Self, HfError> {
        let variant = VARIANTS.into_iter().find(|variant| variant.hf().model_type == kind);
        Self::from_hf(config, variant.unwrap_or_default())
    }

    fn write_hf(&self) -> Result<Value, HfError> {
        Ok(self.to_hf())
    }

    fn owners(key: &str) -> Vec<String> {
        let name = |variant: &MixtralVariant| variant.to_string();
        if key == "variant" {
            return VARIANTS.iter().map(name).collect();
        }
        let tiny = Self::tiny();
        let owned = tiny.owned();
        owned.iter().find(|(owned, ..)| *owned == key).map_or_else(Vec::new, |(.., of)| of.iter().map(name).collect())
    }

    /// The others have a value that changes nothing.
    fn is_needed(key: &str, value: &Value) -> bool {
        let unneeded =
            ["decoder_sparse_step", "n_group", "topk_group", "first_k_dense_replace", "num_nextn_predict_layers"];
        value.is_u64() && !unneeded.contains(&key)
    }

    fn samples(sizes: &SampleSizes) -> Vec<Sample<Self>> {
        use MixtralVariant::{DeepSeek, GptOss, Mixtral, Olmoe, Qwen2Moe, Qwen3Moe};
        let of = |name, about, variant| Sample::new(name, about, sample(sizes, variant));
        vec![
            of("mixtral", "Four experts in the place of each MLP, balance of every sequence, z-loss", Mixtral),
            of(
                "qwen2-moe",
                "The same with biases of queries, keys and values, a gated shared expert, and an MLP in the first layer",
                Qwen2Moe,
            ),
            of(
                "olmoe",
                "Mixtral with norms of whole queries and keys, and shares of a softmax over all experts",
                Olmoe,
            ),
            of(
                "deepseek-moe",
                "Mixtral with an MLP in the first layer, then shares of a softmax over four experts, and a shared one",
                DeepSeek,
            ),
            of("qwen3-moe", "Mixtral with norms of every query and key head, and an MLP in the first layer", Qwen3Moe),
            Sample::new(
                "qwen3-next",
                "Gated DeltaNet, then attention with a gated output and rotary positions of half of the features, in turn; \
                 four experts and a gated shared one; a module of multi-token prediction",
                qwen3_next(sizes),
            ),
            Sample::new(
                "glm4-moe",
                "Grouped queries with rotary positions of half of the features, biases of queries, keys and values and \
                 norms of every query and key head; an MLP in the first layer, then four experts in two groups, chosen by \
                 sigmoid scores and a bias, and a shared one; a module of multi-token prediction",
                glm4_moe(sizes),
            ),
            of(
                "gpt-oss",
                "Four experts with biases and clamped SwiGLU in the place of each MLP, attention sinks, a window in every \
                 other layer",
                GptOss,
            ),
        ]
    }

    fn of_megatron(model: &MegatronModel) -> Option<Self> {
        model.experts.as_ref().map(|experts| {
            sized! { Self::tiny();
                vocab_size: model.vocab_size, hidden_size: model.hidden_size,
                intermediate_size: experts.moe_ffn_hidden_size, num_hidden_layers: model.num_layers,
                num_attention_heads: model.num_attention_heads, num_key_value_heads: model.num_query_groups,
                head_dim: model.head_dim(), num_experts: experts.num_experts,
                num_experts_per_tok: experts.moe_router_topk, router_aux_loss_coef: experts.moe_aux_loss_coeff,
                rope_theta: model.rotary_base, rms_norm_eps: model.norm_epsilon, tie_word_embeddings: model.tied
            }
        })
    }
}

/// The balance over a sequence is the same in every layout; that over a micro-batch depends on its sequences.
fn sample(sizes: &SampleSizes, variant: MixtralVariant) -> MixtralConfig {
    let is_qwen = matches!(variant, MixtralVariant::Qwen2Moe | MixtralVariant::Qwen3Moe);
    let is_gpt_oss = variant == MixtralVariant::GptOss;
    let is_deepseek = variant == MixtralVariant::DeepSeek;
    MixtralConfig {
        variant,
        vocab_size: sizes.vocab,
        hidden_size: sizes.hidden,
        intermediate_size: sizes.intermediate,
        moe_intermediate_size: (is_qwen || is_deepseek).then_some(sizes.intermediate / 2),
        first_k_dense_replace: usize::from(is_deepseek),
        norm_topk_prob: !is_deepseek && variant != MixtralVariant::Olmoe,
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
        head_dim: sizes.head_dim(),
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
fn qwen3_next(sizes: &SampleSizes) -> MixtralConfig {
    MixtralConfig {
        moe_intermediate_size: Some(sizes.intermediate / 2),
        shared_expert_intermediate_size: Some(sizes.intermediate / 2),
        partial_rotary_factor: Some(0.5),
        full_attention_interval: Some(LayerPattern::Every(2)),
        linear_num_key_heads: Some(sizes.heads),
        linear_num_value_heads: Some(2 * sizes.heads),
        linear_key_head_dim: Some(sizes.head_dim()),
        linear_value_head_dim: Some(sizes.head_dim()),
        num_nextn_predict_layers: 1,
        mtp_loss_scaling_factor: Some(0.5),
        ..sample(sizes, MixtralVariant::Qwen3Next)
    }
}

fn glm4_moe(sizes: &SampleSizes) -> MixtralConfig {
    MixtralConfig {
        moe_intermediate_size: Some(sizes.intermediate / 2),
        first_k_dense_replace: 1,
        n_group: 2,
        topk_group: 1,
        routed_scaling_factor: 2.5,
        moe_router_bias_update_rate: Some(0.01),
        attention_bias: true,
        use_qk_norm: true,
        num_nextn_predict_layers: 1,
        mtp_loss_scaling_factor: Some(0.5),
        ..sample(sizes, MixtralVariant::Glm4Moe)
    }
}
