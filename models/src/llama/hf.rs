//! Llama and its relatives in Hugging Face's words: names of tensors and `config.json`.

use serde_json::{Value, json};

use super::config::LlamaConfig;
use super::variant::LlamaVariant;
use crate::hf::decoder::{self, GROUPED_QUERIES};
use crate::hf::{ConfigReader, HfError, rope};
use crate::names::NameMap;

/// The names of the tensors of `LlamaForCausalLM`, `MistralForCausalLM`, `Qwen3ForCausalLM`.
pub(super) fn names(config: &LlamaConfig) -> NameMap {
    config.frame().hf_names(|_| config.block())
}

impl LlamaConfig {
    /// Reads the `config.json` of a relative, with rotary parameters in the form of transformers 5 (`rope_parameters`)
    /// or 4 (`rope_theta` and `rope_scaling`). An absent key has transformers' default, where all relatives have the
    /// same one.
    ///
    /// # Errors
    /// Names the key that is missing, unknown, or asks for something this model does not do.
    pub fn from_hf(config: &Value, variant: LlamaVariant) -> Result<Self, HfError> {
        let config = ConfigReader::new(config)?;
        config.expect_model(variant.model_type())?;
        config.expect_or_absent("hidden_act", "silu")?;
        config.expect_number("pretraining_tp", 1.0, 1.0)?;
        let (hidden_size, heads) = (config.size("hidden_size")?, config.size("num_attention_heads")?);
        let (rope_theta, rope_scaling) = rope::read(&config, 10_000.0)?;
        let llama = variant == LlamaVariant::Llama;
        let read = Self {
            variant,
            vocab_size: config.size("vocab_size")?,
            hidden_size,
            intermediate_size: config.size("intermediate_size")?,
            num_hidden_layers: config.size("num_hidden_layers")?,
            num_attention_heads: heads,
            num_key_value_heads: match llama {
                true => config.size_or("num_key_value_heads", heads)?,
                false => config.size("num_key_value_heads")?,
            },
            head_dim: match variant {
                LlamaVariant::Qwen3 => config.size("head_dim")?,
                _ => config.size_or("head_dim", hidden_size / heads)?,
            },
            max_position_embeddings: config.size("max_position_embeddings")?,
            sliding_window: window(&config, variant)?,
            rope_theta,
            rope_scaling,
            rms_norm_eps: config.number("rms_norm_eps")?.unwrap_or(1e-6),
            tie_word_embeddings: config.flag("tie_word_embeddings")?,
            attention_bias: config.flag("attention_bias")?,
            mlp_bias: config.flag("mlp_bias")?,
            initializer_range: config.number("initializer_range")?.unwrap_or(0.02),
            hidden_dropout: 0.0,
            attention_dropout: config.number("attention_dropout")?.unwrap_or(0.0),
            make_vocab_size_divisible_by: 1,
        };
        if variant == LlamaVariant::Mistral {
            config.expect_flag("attention_bias", false)?;
        }
        if !llama {
            config.expect_flag("mlp_bias", false)?;
        }
        layer_types(&config, &read)?;
        config.finish(variant.harmless())?;
        Ok(read)
    }

    /// The `config.json` of this model, in the form of transformers 5.
    pub fn to_hf(&self) -> Value {
        let kind = self.variant.model_type();
        let rope = rope::written(self.rope_theta, self.rope_scaling);
        let mut config = decoder::written(kind, self, &GROUPED_QUERIES, rope);
        match self.variant {
            LlamaVariant::Llama => {
                config["attention_bias"] = json!(self.attention_bias);
                config["mlp_bias"] = json!(self.mlp_bias);
            }
            LlamaVariant::Mistral => config["sliding_window"] = json!(self.sliding_window),
            LlamaVariant::Qwen3 => {
                config["attention_bias"] = json!(self.attention_bias);
                config["use_sliding_window"] = json!(false);
            }
        }
        config
    }
}

/// The sliding window, which transformers gives to Mistral unless the key says `null`.
fn window(config: &ConfigReader, variant: LlamaVariant) -> Result<Option<usize>, HfError> {
    match variant {
        LlamaVariant::Llama => Ok(None),
        LlamaVariant::Mistral if !config.has("sliding_window") => {
            Err(HfError::Missing { key: "sliding_window".into() })
        }
        LlamaVariant::Mistral => config.optional_size("sliding_window"),
        LlamaVariant::Qwen3 => config.expect_flag("use_sliding_window", false).map(|()| None),
    }
}

/// Every layer has the same kind of attention, if the file lists them.
fn layer_types(config: &ConfigReader, read: &LlamaConfig) -> Result<(), HfError> {
    let Some(types) = config.texts("layer_types")? else { return Ok(()) };
    let legal = if read.sliding_window.is_some() { "sliding_attention" } else { "full_attention" };
    if types.len() != read.num_hidden_layers || types.iter().any(|kind| *kind != legal) {
        let legal = format!("{} x {legal}", read.num_hidden_layers);
        return Err(config.unsupported("layer_types", &types.join(", "), &legal));
    }
    Ok(())
}
