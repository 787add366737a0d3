//! Mamba-2 in Hugging Face's words: names of tensors, and `config.json`.

use serde_json::{Value, json};

use super::config::Mamba2Config;
use crate::hf::{ConfigReader, HfArchitecture, HfError, keys, written};

/// What Hugging Face calls it.
pub(super) const ARCHITECTURE: HfArchitecture = HfArchitecture::new("mamba2", "Mamba2ForCausalLM");

/// Keys that say how a new model begins, and how positions are chunked.
const HARMLESS: [&str; 6] =
    keys!["chunk_size" "rescale_prenorm_residual" "time_step_floor" "time_step_max" "time_step_min" "time_step_rank"];

impl Mamba2Config {
    /// Reads a `config.json` with `"model_type": "mamba2"`. An absent key has transformers' default.
    ///
    /// # Errors
    /// Names the key that is missing, unknown, or asks for something this model does not do.
    pub fn from_hf(config: &Value) -> Result<Self, HfError> {
        let config = ConfigReader::new(config)?;
        config.expect_model(ARCHITECTURE)?;
        config.expect_or_absent("hidden_act", "silu")?;
        config.expect_flag("rms_norm", true)?;
        let (hidden_size, num_heads) = (config.size("hidden_size")?, config.size_or("num_heads", 128)?);
        let head_dim = config.size_or("head_dim", 64)?;
        let limits = config.limits("time_step_limit")?;
        let [time_step_limit_min, largest] = limits.unwrap_or([0.0, f64::INFINITY]);
        let read = Self {
            vocab_size: config.size("vocab_size")?,
            hidden_size,
            num_hidden_layers: config.size("num_hidden_layers")?,
            num_heads,
            head_dim,
            state_size: config.size_or("state_size", 128)?,
            n_groups: config.size_or("n_groups", 8)?,
            conv_kernel: config.size_or("conv_kernel", 4)?,
            use_conv_bias: config.flag_or("use_conv_bias", true)?,
            use_bias: config.flag("use_bias")?,
            time_step_limit_min,
            time_step_limit_max: Some(largest).filter(|largest| largest.is_finite()),
            layer_norm_epsilon: config.number("layer_norm_epsilon")?.unwrap_or(1e-5),
            residual_in_fp32: config.flag_or("residual_in_fp32", true)?,
            tie_word_embeddings: config.flag("tie_word_embeddings")?,
            initializer_range: config.number("initializer_range")?.unwrap_or(0.1),
            hidden_dropout: 0.0,
            make_vocab_size_divisible_by: 1,
        };
        let (found, expand) = (config.number("expand")?.unwrap_or(2.0), read.expand());
        if found != expand {
            let value = format!("{found} for a hidden_size of {}", read.hidden_size);
            return Err(config.unsupported("expand", &value, &expand.to_string()));
        }
        config.finish(&HARMLESS)?;
        Ok(read)
    }

    /// The `config.json` of this model, in the form of transformers 5.
    pub fn to_hf(&self) -> Value {
        let largest = match self.time_step_limit_max {
            Some(largest) => json!(largest),
            // JSON has no infinity.
            None => json!({"__float__": "Infinity"}),
        };
        let expand = self.expand();
        let further = json!({
            "architectures": [ARCHITECTURE.class],
            "model_type": "mamba2",
            "hidden_act": "silu",
            "expand": if expand.fract() == 0.0 { json!(expand as u64) } else { json!(expand) },
            "time_step_limit": [json!(self.time_step_limit_min), largest],
        });
        let ours = ["time_step_limit_min", "time_step_limit_max", "hidden_dropout", "make_vocab_size_divisible_by"];
        written(self, &ours, further)
    }

    /// How many times wider than the residual stream all heads are.
    fn expand(&self) -> f64 {
        (self.num_heads as f64 * self.head_dim as f64) / self.hidden_size as f64
    }
}
