//! What a LLaVA is made of, under Hugging Face's names, and its `config.json`.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::activation::Activation;
use crate::causal_lm::ModelConfig;
use crate::config::{ConfigError, expect};
use crate::hf::{ConfigReader, HfError};
use crate::images::ClipVisionConfig;
use crate::{LlamaConfig, LlamaVariant};

/// The sizes of a [`Llava`](super::Llava).
///
/// ```
/// use models::images::LlavaConfig;
///
/// let mut file = LlavaConfig::tiny().to_hf();
/// assert_eq!(LlavaConfig::from_hf(&file)?, LlavaConfig::tiny());
/// file["vision_feature_layer"] = (-5).into();
/// let refused = LlavaConfig::from_hf(&file).unwrap_err().to_string();
/// assert_eq!(refused, "config.json: `vision_feature_layer` is -5, which this model does not have; nearest legal: -4 to 3");
/// # Ok::<(), models::hf::HfError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LlavaConfig {
    /// The image tower.
    pub vision_config: ClipVisionConfig,
    /// The language model, a Llama or Qwen2. Its output layer may be the embedding.
    pub text_config: LlamaConfig,
    /// The token that stands for one patch of an image.
    pub image_token_index: usize,
    /// Of the projector.
    pub projector_hidden_act: Activation,
    /// Whether the projector has biases.
    pub multimodal_projector_bias: bool,
    /// After how many blocks of the tower its hidden states are taken; in files a negative number counts from the end.
    pub feature_blocks: usize,
    /// Whether the tower's first position, CLIP's class token, is left out (`vision_feature_select_strategy`: `default`)
    /// or is a feature like the others (`full`). Transformers leaves out the first patch of SigLIP in the same way.
    pub patches_only: bool,
}

/// What transformers' `LlamaConfig` and `Qwen2Config` have where a `text_config` says nothing, as published files do.
fn text_defaults(variant: LlamaVariant) -> Value {
    let mut defaults = json!({
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    });
    if variant == LlamaVariant::Qwen2 {
        for (key, value) in [("vocab_size", 151936), ("intermediate_size", 22016), ("max_position_embeddings", 32768)] {
            defaults[key] = value.into();
        }
        defaults["num_key_value_heads"] = 32.into();
    }
    defaults
}

impl LlavaConfig {
    /// A few thousand parameters.
    pub fn tiny() -> Self {
        Self {
            vision_config: ClipVisionConfig::tiny(),
            text_config: LlamaConfig::tiny(),
            image_token_index: 255,
            projector_hidden_act: Activation::Gelu,
            multimodal_projector_bias: true,
            feature_blocks: 2,
            patches_only: true,
        }
    }

    /// Image tokens of one image.
    pub fn image_tokens(&self) -> usize {
        self.vision_config.positions() - usize::from(self.patches_only)
    }

    /// Whether the sizes make a model.
    ///
    /// # Errors
    /// Names the sizes that contradict each other, and the nearest legal ones.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.vision_config.check()?;
        self.text_config.check()?;
        // Its language model sees all positions so far.
        if let Some(window) = (0..self.text_config.num_hidden_layers).find_map(|layer| self.text_config.window(layer)) {
            let (key, owner) = ("text_config.sliding_window", "language models without images".into());
            return Err(ConfigError::Foreign { key, value: window.to_string(), owner, variant: "llava".into() });
        }
        let (image, vocabulary) = (self.image_token_index, self.text_config.vocab_size);
        let (most, token) = ((vocabulary - 1) as f64, ("image_token_index", image as f64));
        expect(image < vocabulary, token, "a token of the vocabulary", most)
    }

    /// Reads the `config.json` of `LlavaForConditionalGeneration`. An absent key has transformers' default.
    ///
    /// # Errors
    /// Names the key that is unknown or asks for something this model does not do, or sizes that contradict each other.
    pub fn from_hf(file: &Value) -> Result<Self, HfError> {
        let config = ConfigReader::new(file)?;
        config.expect_module("llava")?;
        for part in ["vision_config", "text_config"] {
            config.object(part)?.ok_or_else(|| HfError::Missing { key: part.into() })?;
        }
        let vision_config = ClipVisionConfig::from_hf(&file["vision_config"]).map_err(|e| e.inside("vision_config"))?;
        let variant = variant(&file["text_config"]).map_err(|error| error.inside("text_config"))?;
        let text = with_defaults(&file["text_config"], variant);
        let mut text_config = LlamaConfig::from_hf(&text, variant).map_err(|error| error.inside("text_config"))?;
        if text_config.attention_dropout != 0.0 {
            let dropout = text_config.attention_dropout.to_string();
            return Err(config.unsupported("attention_dropout", &dropout, "0").inside("text_config"));
        }
        if let Some(scaling) = text_config.rope_scaling.filter(|scaling| scaling.cached_positions().is_some()) {
            return Err(config
                .unsupported("rope_type", scaling.name(), "default, linear, llama3, yarn")
                .inside("text_config"));
        }
        // Transformers 4 reads the language model's, 5 the whole model's.
        text_config.tie_word_embeddings |= config.flag("tie_word_embeddings")?;
        let strategy = config.text("vision_feature_select_strategy")?.unwrap_or("default");
        let read = Self {
            feature_blocks: feature_blocks(&config, vision_config.num_hidden_layers)?,
            vision_config,
            text_config,
            image_token_index: image_token(&config)?,
            projector_hidden_act: Activation::read(&config, "projector_hidden_act", Activation::Gelu)?,
            multimodal_projector_bias: config.flag_or("multimodal_projector_bias", true)?,
            patches_only: match strategy {
                "default" => true,
                "full" => false,
                other => return Err(config.unsupported("vision_feature_select_strategy", other, "default, full")),
            },
        };
        config.finish(&["ignore_index", "image_seq_length", "vocab_size"])?;
        read.check()?;
        Ok(read)
    }

    /// The `config.json` of this model, in the form of transformers 5.
    pub fn to_hf(&self) -> Value {
        json!({
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "vision_config": self.vision_config.to_hf(),
            "text_config": self.text_config.to_hf(),
            "image_token_index": self.image_token_index,
            "image_seq_length": self.image_tokens(),
            "projector_hidden_act": self.projector_hidden_act.name(),
            "multimodal_projector_bias": self.multimodal_projector_bias,
            "vision_feature_layer": self.feature_blocks as i64 - self.vision_config.num_hidden_layers as i64 - 1,
            "vision_feature_select_strategy": if self.patches_only { "default" } else { "full" },
            "tie_word_embeddings": self.text_config.tie_word_embeddings,
        })
    }
}

/// The language model's kind.
fn variant(text: &Value) -> Result<LlamaVariant, HfError> {
    let config = ConfigReader::new(text)?;
    match config.text("model_type")?.unwrap_or("llama") {
        "llama" => Ok(LlamaVariant::Llama),
        "qwen2" => Ok(LlamaVariant::Qwen2),
        other => Err(config.unsupported("model_type", other, "llama, qwen2")),
    }
}

/// `text_config` with [`text_defaults`] where it says nothing.
fn with_defaults(text: &Value, variant: LlamaVariant) -> Value {
    let mut keys: Map<String, Value> = text_defaults(variant).as_object().cloned().unwrap_or_default();
    keys.extend(text.as_object().cloned().unwrap_or_default());
    Value::Object(keys)
}

/// The image token, which has had two names.
fn image_token(config: &ConfigReader) -> Result<usize, HfError> {
    let (id, index) = (config.optional_size("image_token_id")?, config.optional_size("image_token_index")?);
    match (id, index) {
        (Some(id), Some(index)) if id != index => {
            let legal = format!("{index}, as `image_token_index`");
            Err(config.unsupported("image_token_id", &id.to_string(), &legal))
        }
        _ => Ok(id.or(index).unwrap_or(32000)),
    }
}

/// `vision_feature_layer` as a number of blocks: hidden states are those before the first block, then those after each.
fn feature_blocks(config: &ConfigReader, blocks: usize) -> Result<usize, HfError> {
    let key = "vision_feature_layer";
    let (found, states) = (config.number(key)?.unwrap_or(-2.0), blocks as f64 + 1.0);
    let index = if found < 0.0 { found + states } else { found };
    match index.fract() == 0.0 && (0.0..states).contains(&index) {
        true => Ok(index as usize),
        false => Err(config.unsupported(key, &found.to_string(), &format!("-{states} to {blocks}"))),
    }
}
