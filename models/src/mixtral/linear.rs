//! Qwen3-Next's layers: three of linear attention for one of attention with a gated output. Field names are Hugging
//! Face's; the defaults are those of `configuration_qwen3_next.py`.

use serde_json::{Value, json};

use super::config::MixtralConfig;
use super::glm;
use super::variant::MixtralVariant;
use crate::config::{ConfigError, divides, positive, taps};
use crate::hf::{ConfigReader, HfError, layers};
use crate::layers::{
    AttentionConfig, GatedDeltaConfig, LayerPattern, LinearConfig, Mixer, NormKind, NormOver, QueryKeyNorm,
};
use crate::limits;

/// Every so many layers one has attention.
const INTERVAL: LayerPattern = LayerPattern::Every(4);
/// Share of a head's features that are rotated.
const ROTATED: f64 = 0.25;

impl MixtralConfig {
    /// Whether a layer has linear attention; modules of multi-token prediction have none.
    pub fn is_linear(&self, layer: usize) -> bool {
        let full = self.full_attention_interval.as_ref().unwrap_or(&INTERVAL);
        self.variant == MixtralVariant::Qwen3Next && layer < self.num_hidden_layers && !full.has(layer)
    }

    /// The layers with linear attention.
    pub fn linear_layers(&self) -> Vec<usize> {
        (0..self.num_hidden_layers).filter(|layer| self.is_linear(*layer)).collect()
    }

    /// The sizes of layers with linear attention.
    pub fn linear_attention(&self) -> GatedDeltaConfig {
        let llama = self.llama();
        GatedDeltaConfig {
            hidden: self.hidden_size,
            key_heads: self.linear_num_key_heads.unwrap_or(16),
            value_heads: self.linear_num_value_heads.unwrap_or(32),
            key_dim: self.linear_key_head_dim.unwrap_or(128),
            value_dim: self.linear_value_head_dim.unwrap_or(128),
            kernel: self.linear_conv_kernel_dim.unwrap_or(4),
            norm_eps: self.rms_norm_eps,
            input: llama.init(),
            output: llama.residual_init(),
        }
    }

    /// Share of a head's features that are rotated.
    pub(super) fn rotated_share(&self) -> Option<f64> {
        let default = match self.variant {
            MixtralVariant::Qwen3Next => ROTATED,
            MixtralVariant::Glm4Moe => glm::ROTATED,
            _ => return None,
        };
        Some(self.partial_rotary_factor.unwrap_or(default))
    }

    pub(super) fn norm(&self) -> NormKind {
        match self.variant {
            MixtralVariant::Qwen3Next => NormKind::RmsPlusOne,
            _ => NormKind::Rms,
        }
    }

    pub(super) fn mixer(&self, layer: usize) -> Mixer {
        if self.is_linear(layer) {
            return Mixer::GatedDelta(self.linear_attention());
        }
        let attention = self.llama().attention(layer);
        Mixer::Attention(AttentionConfig {
            window: self.window(layer),
            output: LinearConfig { bias: self.has_output_bias(), ..attention.output },
            sinks: self.variant == MixtralVariant::GptOss,
            output_gate: self.variant == MixtralVariant::Qwen3Next,
            query_key_norm: match self.variant {
                MixtralVariant::Olmoe => {
                    Some(QueryKeyNorm { over: NormOver::Projection, kind: self.norm(), eps: self.rms_norm_eps })
                }
                _ => attention.query_key_norm.map(|norm| QueryKeyNorm { kind: self.norm(), ..norm }),
            },
            ..attention
        })
    }

    /// Whether the sizes of linear attention make layers.
    pub(super) fn check_linear(&self) -> Result<(), ConfigError> {
        if self.variant != MixtralVariant::Qwen3Next {
            return Ok(());
        }
        let GatedDeltaConfig { key_heads, value_heads, key_dim, value_dim, kernel, .. } = self.linear_attention();
        let keys = [("linear_num_key_heads", key_heads), ("linear_key_head_dim", key_dim)];
        let values = [("linear_num_value_heads", value_heads), ("linear_value_head_dim", value_dim)];
        positive(&[keys, values].concat())?;
        taps("linear_conv_kernel_dim", kernel)?;
        let layers = [("num_hidden_layers", self.num_hidden_layers), ("hidden_size", self.hidden_size)];
        for heads in [keys, values] {
            limits::elements(&[layers, heads].concat())?;
        }
        // The rows of the heads' projections are in another order in files.
        limits::reordered(&[("num_hidden_layers", self.num_hidden_layers), keys[0], ("parts", 4)])?;
        divides("linear_num_key_heads", key_heads, "linear_num_value_heads", value_heads)
    }

    /// Adds the keys that only this model has to its `config.json`.
    pub(super) fn write_linear(&self, config: &mut Value) {
        let linear = self.linear_attention();
        let keys = json!({
            "moe_intermediate_size": self.expert_size(),
            "shared_expert_intermediate_size": self.shared_expert(),
            "norm_topk_prob": self.norm_topk_prob,
            "decoder_sparse_step": self.decoder_sparse_step,
            "mlp_only_layers": self.mlp_only_layers,
            "attention_bias": self.attention_bias,
            "num_experts": self.num_experts,
            "layer_types": self.mixer_types(),
            "linear_num_key_heads": linear.key_heads,
            "linear_num_value_heads": linear.value_heads,
            "linear_key_head_dim": linear.key_dim,
            "linear_value_head_dim": linear.value_dim,
            "linear_conv_kernel_dim": linear.kernel,
        });
        self.add_keys(config, keys);
        if self.num_nextn_predict_layers > 0 {
            config["num_nextn_predict_layers"] = json!(self.num_nextn_predict_layers);
        }
    }

    /// Adds keys of a family whose experts have another key, and the rotated share if there is one.
    pub(super) fn add_keys(&self, config: &mut Value, keys: Value) {
        let (Value::Object(keys), Some(config)) = (keys, config.as_object_mut()) else { return };
        config.extend(keys);
        config.remove("num_local_experts");
        if let (Some(rope), Some(share)) = (config.get_mut("rope_parameters"), self.rotated_share()) {
            rope["partial_rotary_factor"] = json!(share);
        }
    }

    /// transformers' words for the layers' mixers.
    pub(super) fn mixer_types(&self) -> Vec<&'static str> {
        let kind = |layer| if self.is_linear(layer) { "linear_attention" } else { "full_attention" };
        (0..self.num_hidden_layers).map(kind).collect()
    }
}

/// The layers of attention: by the list of all layers, else by the key.
pub(super) fn read_full(config: &ConfigReader, layers: usize) -> Result<Option<LayerPattern>, HfError> {
    let of_key = config.optional_size("full_attention_interval")?.map(LayerPattern::Every);
    // Without a layer of attention: the last of more layers than the model has.
    let of_list = layers::kind_pattern(config, layers)?.map(|full| full.unwrap_or(LayerPattern::Every(layers + 1)));
    Ok(of_list.or(of_key))
}
