//! GPT in Hugging Face's words (GPT-2): names of tensors and `config.json`.

use serde_json::{Value, json};

use super::config::GptConfig;
use crate::hf::{ConfigReader, HfArchitecture, HfError, keys};
use crate::limits::limit;
use crate::names::{Foreign, NameMap};

/// What Hugging Face calls it.
pub(super) const ARCHITECTURE: HfArchitecture = HfArchitecture::new("gpt2", "GPT2LMHeadModel");

/// Keys of a head that classifies, which a language model does not have, and of OpenAI's GPT before it.
const HARMLESS: [&str; 7] = keys![
    "n_special" "predict_special_tokens" "summary_activation" "summary_first_dropout" "summary_proj_to_labels"
    "summary_type" "summary_use_proj"
];

fn norm(map: &mut NameMap, ours: &str, theirs: &str, hidden: usize) {
    for part in ["weight", "bias"] {
        map.same(format!("{ours}.{part}"), format!("{theirs}.{part}"), &[hidden]);
    }
}

/// A `Conv1D` of shape `[in, out]` with its bias; `rows` are those of its outputs that are ours.
fn linear(
    map: &mut NameMap,
    config: &GptConfig,
    ours: &str,
    theirs: &str,
    [input, out]: [usize; 2],
    rows: Option<std::ops::Range<usize>>,
) {
    let rows = rows.map(|rows| vec![rows]);
    let weight = Foreign {
        name: format!("{theirs}.weight"),
        transposed: true,
        rows: rows.clone(),
        stack: None,
        shape: vec![input, out],
    };
    map.add(format!("{ours}.weight"), weight);
    if config.bias {
        let bias = Foreign { name: format!("{theirs}.bias"), transposed: false, rows, stack: None, shape: vec![out] };
        map.add(format!("{ours}.bias"), bias);
    }
}

impl GptConfig {
    /// The names of `GPT2LMHeadModel`'s tensors. Its linear layers store `[in, out]`, and query, key and value are one.
    pub(super) fn gpt2_names(&self) -> NameMap {
        let (hidden, width) = (self.hidden_size, self.intermediate_size);
        let mut map = NameMap::default();
        let table = [self.vocab_size, hidden];
        map.same("embed_tokens.weight", "transformer.wte.weight", &table);
        map.same("embed_positions.weight", "transformer.wpe.weight", &[self.max_position_embeddings, hidden]);
        for layer in 0..self.num_hidden_layers {
            let (ours, theirs) = (format!("layers.{layer}"), format!("transformer.h.{layer}"));
            norm(&mut map, &format!("{ours}.input_layernorm"), &format!("{theirs}.ln_1"), hidden);
            norm(&mut map, &format!("{ours}.post_attention_layernorm"), &format!("{theirs}.ln_2"), hidden);
            for (index, part) in ["q", "k", "v"].iter().enumerate() {
                let rows = Some(index * hidden..(index + 1) * hidden);
                let (ours, theirs) = (format!("{ours}.attention.{part}_proj"), format!("{theirs}.attn.c_attn"));
                linear(&mut map, self, &ours, &theirs, [hidden, 3 * hidden], rows);
            }
            let layers = [
                ("attention.o_proj", "attn.c_proj", [hidden, hidden]),
                ("mlp.up_proj", "mlp.c_fc", [hidden, width]),
                ("mlp.down_proj", "mlp.c_proj", [width, hidden]),
            ];
            for (our, their, shape) in layers {
                linear(&mut map, self, &format!("{ours}.{our}"), &format!("{theirs}.{their}"), shape, None);
            }
        }
        norm(&mut map, "norm", "transformer.ln_f", hidden);
        if !self.tie_word_embeddings {
            map.same("lm_head.weight", "lm_head.weight", &table);
        }
        map
    }

    /// Reads a `config.json` with `"model_type": "gpt2"`. An absent key has transformers' default.
    ///
    /// # Errors
    /// Names the key that is missing, unknown, or asks for something this model does not do.
    pub fn from_hf(config: &Value) -> Result<Self, HfError> {
        let config = ConfigReader::new(config)?;
        config.expect_model(ARCHITECTURE)?;
        let activation = config.text("activation_function")?.unwrap_or("gelu_new");
        let gelu_tanh = match activation {
            "gelu_new" | "gelu_pytorch_tanh" => true,
            "gelu" => false,
            other => return Err(config.unsupported("activation_function", other, "gelu_new, gelu")),
        };
        config.expect_flag("scale_attn_weights", true)?;
        config.expect_flag("scale_attn_by_inverse_layer_idx", false)?;
        config.expect_flag("add_cross_attention", false)?;
        // Another order of the same operations, in fp32.
        config.expect_flag("reorder_and_upcast_attn", false)?;
        let dropout = |key| match config.number(key)?.unwrap_or(0.1) {
            share if (0.0..1.0).contains(&share) => Ok(share),
            other => Err(config.unsupported(key, &format!("{other:?}"), "at least 0 and below 1")),
        };
        let (attention_dropout, hidden_dropout) = (dropout("attn_pdrop")?, dropout("resid_pdrop")?);
        let embedding_dropout = dropout("embd_pdrop")?;
        if embedding_dropout != hidden_dropout {
            let legal = format!("resid_pdrop ({hidden_dropout})");
            return Err(config.unsupported("embd_pdrop", &embedding_dropout.to_string(), &legal));
        }
        let hidden_size = config.size("n_embd")?;
        // The width of the MLP follows from it.
        let most = limit("intermediate_size") / 4;
        if hidden_size as u64 > most {
            return Err(HfError::TooLarge { key: "n_embd".into(), value: hidden_size as u64, most });
        }
        let max_position_embeddings = config.size("n_positions")?;
        if let Some(context) = config.optional_size("n_ctx")?.filter(|context| *context != max_position_embeddings) {
            return Err(config.unsupported("n_ctx", &context.to_string(), &max_position_embeddings.to_string()));
        }
        let read = Self {
            vocab_size: config.size("vocab_size")?,
            max_position_embeddings,
            hidden_size,
            intermediate_size: config.size_or("n_inner", 4 * hidden_size)?,
            num_hidden_layers: config.size("n_layer")?,
            num_attention_heads: config.size("n_head")?,
            layer_norm_epsilon: config.number("layer_norm_epsilon")?.unwrap_or(1e-5),
            gelu_tanh,
            bias: true,
            tie_word_embeddings: config.flag_or("tie_word_embeddings", true)?,
            initializer_range: config.number("initializer_range")?.unwrap_or(0.02),
            hidden_dropout,
            attention_dropout,
            make_vocab_size_divisible_by: 1,
        };
        config.finish(&HARMLESS)?;
        Ok(read)
    }

    /// The `config.json` of this model.
    ///
    /// # Errors
    /// If the model has no biases, which GPT-2 cannot say.
    pub fn to_hf(&self) -> Result<Value, HfError> {
        if !self.bias {
            return Err(HfError::NotWritable(
                "model.bias = false: Hugging Face's GPT-2 always has biases, so this model cannot be written as a folder; \
                 `generate --checkpoint DIR` runs it",
            ));
        }
        Ok(json!({
            "architectures": [ARCHITECTURE.class],
            "model_type": "gpt2",
            "activation_function": if self.gelu_tanh { "gelu_new" } else { "gelu" },
            "vocab_size": self.vocab_size,
            "n_positions": self.max_position_embeddings,
            "n_embd": self.hidden_size,
            "n_inner": self.intermediate_size,
            "n_layer": self.num_hidden_layers,
            "n_head": self.num_attention_heads,
            "layer_norm_epsilon": self.layer_norm_epsilon,
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": self.initializer_range,
            "attn_pdrop": self.attention_dropout,
            "resid_pdrop": self.hidden_dropout,
            "embd_pdrop": self.hidden_dropout,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_without_biases_is_no_gpt2() {
        assert!(GptConfig::tiny().to_hf().is_ok());
        let said = GptConfig { bias: false, ..GptConfig::tiny() }.to_hf().unwrap_err().to_string();
        assert!(said.starts_with("model.bias = false: Hugging Face's GPT-2 always has biases"), "{said}");
    }
}
