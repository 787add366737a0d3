//! Llama and its relatives in Hugging Face's words: names of tensors and `config.json`.

use serde_json::{Value, json};

use super::config::LlamaConfig;
use super::variant::LlamaVariant;
use crate::hf::decoder::{self, GROUPED_QUERIES};
use crate::hf::{ConfigReader, HfError, layers, rope};
use crate::layers::{Activation, LayerPattern};

/// GeGLU, in the words of `config.json`.
const GELU_TANH: &str = "gelu_pytorch_tanh";

impl LlamaConfig {
    /// Reads the `config.json` of a relative, with rotary parameters in the form of transformers 5 (`rope_parameters`)
    /// or 4 (`rope_theta` and `rope_scaling`). An absent key has transformers' default, where all relatives have the
    /// same one.
    ///
    /// # Errors
    /// Names the key that is missing, unknown, or asks for something this model does not do.
    pub fn from_hf(config: &Value, variant: LlamaVariant) -> Result<Self, HfError> {
        let (config, of) = (ConfigReader::new(config)?, variant.architecture());
        config.expect_model(of.hf)?;
        let gated = of.activation != Activation::SwiGlu;
        let is_old_gemma = variant == LlamaVariant::Gemma && config.text("hidden_act")? == Some("gelu");
        if !is_old_gemma {
            config.expect_or_absent("hidden_act", if gated { GELU_TANH } else { "silu" })?;
        }
        if gated {
            config.expect_or_absent("hidden_activation", GELU_TANH)?;
        }
        for absent in [
            "use_mrope",
            "rope_interleaved",
            "lm_head_bias",
            "use_bidirectional_attention",
            "attention_out_bias",
            "use_bias",
        ] {
            config.expect_flag(absent, false)?;
        }
        if variant == LlamaVariant::Gemma3 && config.number("attn_logit_softcapping")?.is_some() {
            // transformers reads the key and computes without it.
            return Err(config.unsupported("attn_logit_softcapping", "given", "null"));
        }
        let (hidden_size, heads) = (config.size("hidden_size")?, config.size("num_attention_heads")?);
        let rope = read_rope(&config, variant)?;
        // `null` is none; only what is not there has a default.
        let absent = |key: &str| variant.absent(key).filter(|_| !config.has(key));
        let number = |key: &str| match variant.has(key) {
            true => config.number(key).map(|given| given.or(absent(key))),
            false => Ok(None),
        };
        let default_dropout = if variant == LlamaVariant::SeedOss { 0.1 } else { 0.0 };
        let dropout = |key: &str| match config.number(key)?.unwrap_or(default_dropout) {
            share if (0.0..1.0).contains(&share) => Ok(share),
            share => Err(config.unsupported(key, &share.to_string(), "at least 0 and below 1")),
        };
        let mut read = Self {
            variant,
            vocab_size: config.size("vocab_size")?,
            hidden_size,
            intermediate_size: config.size("intermediate_size")?,
            num_hidden_layers: config.size("num_hidden_layers")?,
            num_attention_heads: heads,
            num_key_value_heads: match variant {
                LlamaVariant::Llama | LlamaVariant::Granite => config.size_or("num_key_value_heads", heads)?,
                _ => config.size("num_key_value_heads")?,
            },
            head_dim: match variant {
                LlamaVariant::Qwen3
                | LlamaVariant::Gemma
                | LlamaVariant::Gemma2
                | LlamaVariant::Gemma3
                | LlamaVariant::Glm4
                | LlamaVariant::SeedOss
                | LlamaVariant::Ernie45 => config.size("head_dim")?,
                _ => config.size_or("head_dim", hidden_size / heads)?,
            },
            max_position_embeddings: config.size("max_position_embeddings")?,
            sliding_window: window(&config, variant)?,
            sliding_window_pattern: None,
            no_rope_layer_interval: None,
            partial_rotary_factor: rope.partial.filter(|share| *share != 1.0),
            rope_local_base_freq: rope.local,
            query_pre_attn_scalar: number("query_pre_attn_scalar")?,
            attn_logit_softcapping: number("attn_logit_softcapping")?,
            final_logit_softcapping: number("final_logit_softcapping")?,
            embedding_multiplier: number("embedding_multiplier")?,
            attention_multiplier: number("attention_multiplier")?,
            residual_multiplier: number("residual_multiplier")?,
            logits_scaling: number("logits_scaling")?,
            rope_theta: rope.theta,
            rope_scaling: rope.scaling,
            rms_norm_eps: match variant {
                LlamaVariant::Olmo2
                | LlamaVariant::Olmo3
                | LlamaVariant::Phi3
                | LlamaVariant::Glm4
                | LlamaVariant::Ernie45 => config.required_number("rms_norm_eps")?,
                _ => config.number("rms_norm_eps")?.unwrap_or(1e-6),
            },
            tie_word_embeddings: config.flag_or("tie_word_embeddings", of.tied)?,
            attention_bias: {
                let default = matches!(variant, LlamaVariant::SeedOss | LlamaVariant::Glm4);
                config.flag_or("attention_bias", default)?
            },
            mlp_bias: config.flag("mlp_bias")?,
            initializer_range: config.number("initializer_range")?.unwrap_or(0.02),
            hidden_dropout: if variant == LlamaVariant::SeedOss { dropout("residual_dropout")? } else { 0.0 },
            attention_dropout: dropout("attention_dropout")?,
            make_vocab_size_divisible_by: 1,
        };
        for bias in ["attention_bias", "mlp_bias"].into_iter().filter(|key| !variant.has(key)) {
            config.expect_flag(bias, false)?;
        }
        for dropout in ["embd_pdrop", "resid_pdrop"].into_iter().filter(|_| variant == LlamaVariant::Phi3) {
            config.expect_number(dropout, 0.0, 0.0)?;
        }
        read.no_rope_layer_interval = no_rope_layers(&config, &read)?;
        if variant.has("sliding_window_pattern") && read.sliding_window.is_some() {
            let last_windowless = config.count_or("max_window_layers", 28)?;
            let default = |layer: usize| match variant {
                LlamaVariant::Gemma2 => LayerPattern::Every(2).has(layer),
                LlamaVariant::Olmo3 => LayerPattern::Every(4).has(layer),
                LlamaVariant::Gemma3 => LayerPattern::Every(6).has(layer),
                LlamaVariant::SmolLm3 => read.rotates(layer),
                _ => layer < last_windowless,
            };
            read.sliding_window_pattern = layers::window_pattern(&config, read.num_hidden_layers, default)?;
        }
        layers::expect_kinds(&config, &read.layer_types())?;
        config.finish(of.harmless)?;
        Ok(read)
    }

    /// The `config.json` of this model, in the form of transformers 5. A `query_pre_attn_scalar` that is no whole number is
    /// written as it is, which transformers does not read.
    pub fn to_hf(&self) -> Value {
        let (of, ours) = (self.variant.architecture(), serde_json::to_value(self).expect("plain data"));
        let mut rope = rope::written(self.rope_theta, self.rope_scaling);
        let share = self.partial_rotary_factor.unwrap_or(1.0);
        if self.variant.has("partial_rotary_factor") {
            rope["partial_rotary_factor"] = json!(share);
        }
        if self.variant.has("rope_local_base_freq") {
            let local = self.local_base().map_or_else(|| rope.clone(), |local| rope::written(local, None));
            rope = json!({"full_attention": rope, "sliding_attention": local});
        }
        let mut config = decoder::written(of.hf, self, &GROUPED_QUERIES, rope);
        if self.variant == LlamaVariant::Gemma {
            config["hidden_act"] = json!(GELU_TANH);
        } else if of.activation != Activation::SwiGlu {
            config.as_object_mut().map(|keys| keys.remove("hidden_act"));
            config["hidden_activation"] = json!(GELU_TANH);
        }
        if self.variant == LlamaVariant::SeedOss {
            config["residual_dropout"] = json!(self.hidden_dropout);
        }
        for key in of.keys {
            match *key {
                "use_sliding_window" => config[*key] = json!(self.sliding_window.is_some()),
                "sliding_window_pattern" => config["layer_types"] = json!(self.layer_types()),
                "no_rope_layer_interval" => config["no_rope_layers"] = json!(self.no_rope_layers()),
                "partial_rotary_factor" => config[*key] = json!(share),
                "rope_local_base_freq" => {}
                "query_pre_attn_scalar" => {
                    config[*key] = self.whole_scalar().map_or(ours[*key].clone(), |of| json!(of))
                }
                // transformers' Granite has 1 where a key is missing, and no `null`.
                "embedding_multiplier" | "residual_multiplier" | "logits_scaling" if ours[*key].is_null() => {
                    config[*key] = json!(1.0)
                }
                "attention_multiplier" if ours[*key].is_null() => {
                    config[*key] = json!((self.head_dim as f64).sqrt().recip())
                }
                key => config[key] = ours[key].clone(),
            }
        }
        config
    }

    /// What attention scores are divided by the square root of, as transformers has it: never `null`, and a whole number.
    ///
    /// # Errors
    /// If it has a fraction.
    pub(super) fn whole_scalar(&self) -> Result<u64, HfError> {
        let (key, scalar) = ("query_pre_attn_scalar", self.query_pre_attn_scalar.unwrap_or(self.head_dim as f64));
        let whole = scalar.round().max(1.0);
        if whole == scalar {
            return Ok(whole as u64);
        }
        Err(HfError::Unsupported { key: key.into(), value: scalar.to_string(), legal: whole.to_string() })
    }

    /// Hugging Face's word for the attention of each layer.
    fn layer_types(&self) -> Vec<&'static str> {
        layers::kinds(|layer| self.window(layer).is_some(), self.num_hidden_layers)
    }

    /// 1 for each layer that rotates, 0 for each that does not, as transformers has it.
    fn no_rope_layers(&self) -> Vec<usize> {
        (0..self.num_hidden_layers).map(|layer| usize::from(self.rotates(layer))).collect()
    }
}

/// What the file says of rotation, with the relative's own defaults.
fn read_rope(config: &ConfigReader, variant: LlamaVariant) -> Result<rope::Rope, HfError> {
    match variant {
        LlamaVariant::Gemma3 => rope::read_by_kind(config, [1e6, 1e4]),
        LlamaVariant::Olmo3 => {
            let base = config.number("rope_theta")?.unwrap_or(5e5);
            let rope = rope::read_by_kind(config, [base; 2])?;
            if rope.local.is_none() {
                return Err(config.unsupported("rope_parameters", "scaled in sliding_attention", "default there"));
            }
            Ok(rope::Rope { local: rope.local.filter(|local| *local != rope.theta), ..rope })
        }
        LlamaVariant::Phi3 => rope::read_partial(config, 1e4),
        LlamaVariant::Glm4 => {
            let rope = rope::read_partial(config, 1e4)?;
            Ok(rope::Rope { partial: rope.partial.or(Some(0.5)), ..rope })
        }
        _ => {
            let base = match variant {
                LlamaVariant::SmolLm3 => 2e6,
                LlamaVariant::Ernie45 => 5e5,
                _ => 1e4,
            };
            let (theta, scaling) = rope::read(config, base)?;
            Ok(rope::Rope { theta, scaling, ..rope::Rope::default() })
        }
    }
}

/// The sliding window, which transformers gives to Mistral unless the key says `null`.
fn window(config: &ConfigReader, variant: LlamaVariant) -> Result<Option<usize>, HfError> {
    match variant {
        LlamaVariant::Mistral if !config.has("sliding_window") => {
            Err(HfError::Missing { key: "sliding_window".into() })
        }
        LlamaVariant::Olmo3 | LlamaVariant::Gemma2 | LlamaVariant::Gemma3 => {
            let window = config.size("sliding_window")?;
            // The published Gemma 2 names it twice.
            config.expect_number("sliding_window_size", window as f64, window as f64)?;
            Ok(Some(window))
        }
        _ if variant.has("use_sliding_window") => layers::window_in_use(config),
        _ if variant.has("sliding_window") => config.optional_size("sliding_window"),
        _ => Ok(None),
    }
}

/// The layers that do not rotate: by the list, in which 0 is such a layer, else the last of every so many.
fn no_rope_layers(config: &ConfigReader, read: &LlamaConfig) -> Result<Option<LayerPattern>, HfError> {
    if !read.variant.has("no_rope_layer_interval") {
        return Ok(None);
    }
    let layers = read.num_hidden_layers;
    let of_key = LayerPattern::Every(config.size_or("no_rope_layer_interval", 4)?);
    let list = config.indices("no_rope_layers")?;
    if let Some(list) = list.as_ref().filter(|list| list.len() != layers || list.iter().any(|rotates| *rotates > 1)) {
        return Err(config.unsupported("no_rope_layers", &format!("{list:?}"), &format!("{layers} times 0 or 1")));
    }
    Ok(LayerPattern::of(layers, |layer| list.as_ref().map_or_else(|| of_key.has(layer), |list| list[layer] == 0)))
}
