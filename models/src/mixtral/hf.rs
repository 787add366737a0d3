//! Mixtral and its relatives in Hugging Face's words: names of tensors and `config.json`.

use serde_json::{Value, json};

use super::config::{MixtralConfig, SWIGLU_ALPHA, SWIGLU_LIMIT};
use super::variant::MixtralVariant;
use super::{deepseek, glm, linear};
use crate::hf::decoder::{self, ExpertNames, GROUPED_QUERIES, LayerNames, USUAL};
use crate::hf::rope::{self, Rope};
use crate::hf::{ConfigReader, HfError, layers};

impl MixtralConfig {
    /// What `MixtralForCausalLM` and its relatives call the tensors of a layer.
    pub(super) fn tensor_names(&self) -> LayerNames {
        match self.variant {
            MixtralVariant::Mixtral => {
                let experts = ExpertNames { module: "block_sparse_moe", matrices: ["w1", "w3", "w2"] };
                LayerNames { experts, ..USUAL }
            }
            MixtralVariant::GptOss => LayerNames { stacked_experts: true, ..USUAL },
            MixtralVariant::Qwen3Next => LayerNames { predictor_apart: true, ..USUAL },
            _ => USUAL,
        }
    }

    /// Reads the `config.json` of a relative, as transformers 5 or 4 writes it. An absent key has transformers'
    /// default, where all relatives have the same one.
    ///
    /// # Errors
    /// Names the key that is missing, unknown, or asks for something this model does not do.
    pub fn from_hf(config: &Value, variant: MixtralVariant) -> Result<Self, HfError> {
        let config = ConfigReader::new(config)?;
        config.expect_model(variant.hf())?;
        config.expect_or_absent("hidden_act", "silu")?;
        let (hidden_size, heads) = (config.size("hidden_size")?, config.size("num_attention_heads")?);
        let rope = match variant {
            MixtralVariant::Qwen3Next | MixtralVariant::Glm4Moe => rope::read_partial(&config, variant.rope_base())?,
            _ => {
                let (theta, scaling) = rope::read(&config, variant.rope_base())?;
                let scaling = if rope::is_given(&config)? { scaling } else { variant.rope_scaling() };
                Rope { theta, scaling, ..Rope::default() }
            }
        };
        let common = Self {
            variant,
            vocab_size: config.size("vocab_size")?,
            hidden_size,
            intermediate_size: config.size("intermediate_size")?,
            num_hidden_layers: config.size("num_hidden_layers")?,
            num_attention_heads: heads,
            num_key_value_heads: match variant {
                MixtralVariant::Olmoe | MixtralVariant::DeepSeek => config.size_or("num_key_value_heads", heads)?,
                _ => config.size("num_key_value_heads")?,
            },
            num_experts: experts_of(&config, variant)?,
            num_experts_per_tok: top_k(&config, variant)?,
            router_aux_loss_coef: balance(&config, variant)?,
            max_position_embeddings: config.size("max_position_embeddings")?,
            rope_theta: rope.theta,
            rope_scaling: rope.scaling,
            rms_norm_eps: config.required_number("rms_norm_eps")?,
            tie_word_embeddings: config.flag("tie_word_embeddings")?,
            initializer_range: config.number("initializer_range")?.unwrap_or(0.02),
            attention_dropout: config.number("attention_dropout")?.unwrap_or(0.0),
            ..Self::tiny()
        };
        let sparse = |common: Self, norm_topk_prob: bool| -> Result<Self, HfError> {
            Ok(Self {
                moe_intermediate_size: Some(config.size("moe_intermediate_size")?),
                norm_topk_prob: config.flag_or("norm_topk_prob", norm_topk_prob)?,
                decoder_sparse_step: config.size_or("decoder_sparse_step", 1)?,
                mlp_only_layers: config.indices("mlp_only_layers")?.unwrap_or_default(),
                ..common
            })
        };
        let read = match variant {
            MixtralVariant::Mixtral => {
                config.expect_number("router_jitter_noise", 0.0, 0.0)?;
                let sliding_window = config.optional_size("sliding_window")?;
                Self { head_dim: config.size_or("head_dim", hidden_size / heads)?, sliding_window, ..common }
            }
            MixtralVariant::GptOss => {
                config.quantisation("mxfp4")?;
                config.expect_number("swiglu_alpha", SWIGLU_ALPHA, SWIGLU_ALPHA)?;
                let read = Self {
                    head_dim: config.size("head_dim")?,
                    sliding_window: Some(config.size("sliding_window")?),
                    sliding_window_pattern: layers::window_pattern(&config, common.num_hidden_layers, |layer| {
                        layer % 2 == 1
                    })?,
                    swiglu_limit: config.number("swiglu_limit")?.filter(|limit| *limit != SWIGLU_LIMIT),
                    attention_bias: config.flag_or("attention_bias", true)?,
                    ..common
                };
                layers::expect_kinds(&config, &read.layer_types())?;
                read
            }
            MixtralVariant::Glm4Moe => glm::read(&config, Self { partial_rotary_factor: rope.partial, ..common })?,
            MixtralVariant::DeepSeek => deepseek::read(&config, common)?,
            MixtralVariant::Olmoe => {
                if let Some(most) = config.number("clip_qkv")? {
                    return Err(config.unsupported("clip_qkv", &most.to_string(), "null"));
                }
                Self {
                    head_dim: config.size_or("head_dim", hidden_size / heads)?,
                    norm_topk_prob: config.flag("norm_topk_prob")?,
                    attention_bias: config.flag("attention_bias")?,
                    ..common
                }
            }
            MixtralVariant::Qwen2Moe => {
                let (sliding_window, last) =
                    (layers::window_in_use(&config)?, config.count_or("max_window_layers", 28)?);
                let full = |layer| layer % 2 == 1 || layer >= last;
                let pattern = layers::window_pattern(&config, common.num_hidden_layers, full)?;
                let sliding_window_pattern = pattern.filter(|_| sliding_window.is_some());
                let common = Self { sliding_window, sliding_window_pattern, ..common };
                layers::expect_kinds(&config, &common.layer_types())?;
                config.expect_flag("qkv_bias", true)?;
                Self {
                    head_dim: config.size_or("head_dim", hidden_size / heads)?,
                    shared_expert_intermediate_size: Some(config.size("shared_expert_intermediate_size")?),
                    ..sparse(common, false)?
                }
            }
            MixtralVariant::Qwen3Moe => Self {
                head_dim: config.size("head_dim")?,
                sliding_window: layers::window_in_use(&config)?,
                attention_bias: config.flag("attention_bias")?,
                ..sparse(common, false)?
            },
            MixtralVariant::Qwen3Next => {
                config.expect_flag("use_sliding_window", false)?;
                let read = Self {
                    head_dim: config.size_or("head_dim", 256)?,
                    shared_expert_intermediate_size: Some(config.size("shared_expert_intermediate_size")?),
                    attention_bias: config.flag("attention_bias")?,
                    partial_rotary_factor: rope.partial,
                    full_attention_interval: linear::read_full(&config, common.num_hidden_layers)?,
                    linear_num_key_heads: config.optional_size("linear_num_key_heads")?,
                    linear_num_value_heads: config.optional_size("linear_num_value_heads")?,
                    linear_key_head_dim: config.optional_size("linear_key_head_dim")?,
                    linear_value_head_dim: config.optional_size("linear_value_head_dim")?,
                    linear_conv_kernel_dim: config.optional_size("linear_conv_kernel_dim")?,
                    num_nextn_predict_layers: config.count_or("num_nextn_predict_layers", 0)?,
                    ..sparse(common, true)?
                };
                layers::expect_kinds(&config, &read.mixer_types())?;
                read
            }
        };
        config.finish(variant.harmless())?;
        Ok(read)
    }

    /// The `config.json` of this model, in the form of transformers 5.
    pub fn to_hf(&self) -> Value {
        let rope = rope::written(self.rope_theta, self.rope_scaling);
        let keys = [&GROUPED_QUERIES[..], &["num_experts_per_tok", "router_aux_loss_coef"]].concat();
        let mut config = decoder::written(self.variant.hf(), self, &keys, rope);
        config["num_local_experts"] = json!(self.num_experts);
        let ours = json!(self);
        let mut copy = |keys: &[&str]| keys.iter().for_each(|key| config[*key] = ours[*key].clone());
        match self.variant {
            MixtralVariant::Mixtral => copy(&["sliding_window"]),
            MixtralVariant::GptOss => {
                copy(&["sliding_window", "attention_bias"]);
                config["output_router_logits"] = json!(self.router_aux_loss_coef != 0.0);
                config["layer_types"] = json!(self.layer_types());
                config["swiglu_limit"] = json!(self.swiglu_limit.unwrap_or(SWIGLU_LIMIT));
            }
            MixtralVariant::Glm4Moe => self.write_glm(&mut config),
            MixtralVariant::DeepSeek => self.write_deepseek(&mut config),
            MixtralVariant::Olmoe => {
                let keys =
                    ["norm_topk_prob", "attention_bias", "num_experts"].map(|key| (key.into(), ours[key].clone()));
                self.add_keys(&mut config, Value::Object(keys.into_iter().collect()));
            }
            MixtralVariant::Qwen2Moe | MixtralVariant::Qwen3Moe => {
                copy(&["norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "sliding_window"]);
                match self.variant {
                    MixtralVariant::Qwen3Moe => copy(&["attention_bias"]),
                    _ => {
                        config["shared_expert_intermediate_size"] = json!(self.shared_expert());
                        config["layer_types"] = json!(self.layer_types());
                    }
                }
                config["moe_intermediate_size"] = json!(self.expert_size());
                config["use_sliding_window"] = json!(self.sliding_window.is_some());
            }
            MixtralVariant::Qwen3Next => self.write_linear(&mut config),
        }
        config
    }
}

impl MixtralConfig {
    fn layer_types(&self) -> Vec<&'static str> {
        layers::kinds(|layer| self.window(layer).is_some(), self.num_hidden_layers)
    }
}

/// The coefficient of the load-balancing loss. transformers adds that loss where `output_router_logits` is true. The
/// published files of all relatives say false; Megatron-Bridge trains the relatives with the loss nevertheless, and gpt-oss
/// without (`moe_router_load_balancing_type = "none"`), as here.
fn balance(config: &ConfigReader, variant: MixtralVariant) -> Result<f64, HfError> {
    let coefficient = config.number("router_aux_loss_coef")?;
    match variant {
        // Read with the tokens that are balanced.
        MixtralVariant::DeepSeek => Ok(0.0),
        MixtralVariant::GptOss if config.flag("output_router_logits")? => Ok(coefficient.unwrap_or(0.9)),
        MixtralVariant::GptOss => Ok(0.0),
        MixtralVariant::Olmoe => Ok(coefficient.unwrap_or(0.01)),
        _ => Ok(coefficient.unwrap_or(0.001)),
    }
}

/// The published gpt-oss names it twice.
fn top_k(config: &ConfigReader, variant: MixtralVariant) -> Result<usize, HfError> {
    let top_k = config.size("num_experts_per_tok")?;
    match variant {
        MixtralVariant::GptOss => config.expect_number("experts_per_token", top_k as f64, top_k as f64).map(|()| top_k),
        _ => Ok(top_k),
    }
}

/// transformers 4 called a Qwen3-MoE's `num_experts`.
fn experts_of(config: &ConfigReader, variant: MixtralVariant) -> Result<usize, HfError> {
    if matches!(variant, MixtralVariant::Glm4Moe | MixtralVariant::DeepSeek) {
        return config.size("n_routed_experts");
    }
    match (config.optional_size("num_local_experts")?, config.optional_size("num_experts")?) {
        (Some(experts), None) | (None, Some(experts)) => Ok(experts),
        (Some(experts), Some(same)) if experts == same => Ok(experts),
        (Some(experts), Some(_)) => Err(config.unsupported("num_experts", "given twice", &experts.to_string())),
        (None, None) => Err(HfError::Missing { key: "num_local_experts".into() }),
    }
}
