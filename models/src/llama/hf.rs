//! Llama in Hugging Face's words: names of tensors and `config.json`.

use serde_json::{Map, Value, json};

use super::config::LlamaConfig;
use crate::hf::{ConfigReader, HfError};
use crate::layers::Llama3Scaling;
use crate::names::NameMap;

/// The names of `LlamaForCausalLM`'s tensors.
pub(super) fn names(config: &LlamaConfig) -> NameMap {
    let (hidden, width, d) = (config.hidden_size, config.intermediate_size, config.head_dim);
    let (queries, keys) = (config.num_attention_heads * d, config.num_key_value_heads * d);
    let mut map = NameMap::default();
    let table = [config.vocab_size, hidden];
    map.same("embed_tokens.weight", "model.embed_tokens.weight", &table);
    for layer in 0..config.num_hidden_layers {
        let ours = format!("layers.{layer}");
        let theirs = format!("model.layers.{layer}");
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            map.same(format!("{ours}.{norm}.weight"), format!("{theirs}.{norm}.weight"), &[hidden]);
        }
        let attention = [("q", queries, hidden), ("k", keys, hidden), ("v", keys, hidden), ("o", hidden, queries)];
        for (part, out, input) in attention {
            let (ours, theirs) = (format!("{ours}.attention.{part}_proj"), format!("{theirs}.self_attn.{part}_proj"));
            linear(&mut map, &ours, &theirs, [out, input], config.attention_bias);
        }
        for (part, out, input) in [("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)] {
            let (ours, theirs) = (format!("{ours}.mlp.{part}_proj"), format!("{theirs}.mlp.{part}_proj"));
            linear(&mut map, &ours, &theirs, [out, input], config.mlp_bias);
        }
    }
    map.same("norm.weight", "model.norm.weight", &[hidden]);
    if !config.tie_word_embeddings {
        map.same("lm_head.weight", "lm_head.weight", &table);
    }
    map
}

fn linear(map: &mut NameMap, ours: &str, theirs: &str, shape: [usize; 2], bias: bool) {
    map.same(format!("{ours}.weight"), format!("{theirs}.weight"), &shape);
    if bias {
        map.same(format!("{ours}.bias"), format!("{theirs}.bias"), &shape[..1]);
    }
}

impl LlamaConfig {
    /// Reads a `config.json` with `"model_type": "llama"`, with rotary parameters in the form of transformers 5
    /// (`rope_parameters`) or 4 (`rope_theta` and `rope_scaling`).
    ///
    /// # Errors
    /// Names the key that is missing or asks for something this model does not do.
    pub fn from_hf(config: &Value) -> Result<Self, HfError> {
        let config = ConfigReader::new(config)?;
        config.expect("model_type", "llama")?;
        config.expect_or_absent("hidden_act", "silu")?;
        config.expect_number("attention_dropout", 0.0, 0.0)?;
        let (hidden_size, heads) = (config.size("hidden_size")?, config.size("num_attention_heads")?);
        let rope = config.object("rope_parameters")?.or(config.object("rope_scaling")?);
        let theta = config.number("rope_theta")?;
        let (nested_theta, rope_scaling) = match &rope {
            Some(rope) => (rope.number("rope_theta")?, scaling(rope)?),
            None => (None, None),
        };
        Ok(Self {
            vocab_size: config.size("vocab_size")?,
            hidden_size,
            intermediate_size: config.size("intermediate_size")?,
            num_hidden_layers: config.size("num_hidden_layers")?,
            num_attention_heads: heads,
            num_key_value_heads: config.size_or("num_key_value_heads", heads)?,
            head_dim: config.size_or("head_dim", hidden_size / heads)?,
            rope_theta: nested_theta.or(theta).unwrap_or(10_000.0),
            rope_scaling,
            rms_norm_eps: config.number("rms_norm_eps")?.unwrap_or(1e-6),
            tie_word_embeddings: config.flag("tie_word_embeddings")?,
            attention_bias: config.flag("attention_bias")?,
            mlp_bias: config.flag("mlp_bias")?,
            initializer_range: config.number("initializer_range")?.unwrap_or(0.02),
            hidden_dropout: 0.0,
            make_vocab_size_divisible_by: 1,
        })
    }

    /// The `config.json` of this model, in the form of transformers 5, without a context length.
    pub fn to_hf(&self) -> Value {
        let mut rope = Map::new();
        rope.insert("rope_theta".into(), json!(self.rope_theta));
        rope.insert("rope_type".into(), json!("default"));
        if let Some(scaling) = self.rope_scaling {
            rope.insert("rope_type".into(), json!("llama3"));
            rope.insert("factor".into(), json!(scaling.factor));
            rope.insert("low_freq_factor".into(), json!(scaling.low_freq_factor));
            rope.insert("high_freq_factor".into(), json!(scaling.high_freq_factor));
            let original = json!(scaling.original_max_position_embeddings);
            rope.insert("original_max_position_embeddings".into(), original);
        }
        json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "rope_parameters": rope,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "initializer_range": self.initializer_range,
        })
    }
}

fn scaling(rope: &ConfigReader) -> Result<Option<Llama3Scaling>, HfError> {
    match rope.text("rope_type")?.or(rope.text("type")?) {
        None | Some("default") => Ok(None),
        Some("llama3") => Ok(Some(Llama3Scaling {
            factor: rope.required_number("factor")?,
            low_freq_factor: rope.required_number("low_freq_factor")?,
            high_freq_factor: rope.required_number("high_freq_factor")?,
            original_max_position_embeddings: rope.size("original_max_position_embeddings")?,
        })),
        Some(other) => Err(rope.unsupported("rope_type", other, "default, llama3")),
    }
}
