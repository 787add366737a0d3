//! Published Gemma 3 of 4, 12 and 27 billion parameters: a language model and an image tower in one folder, of which the
//! language model is read.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

use super::{ConfigReader, HARMLESS, HfArchitecture, HfError};

/// What Hugging Face calls the whole.
pub(crate) const WHOLE: HfArchitecture = HfArchitecture::new("gemma3", "Gemma3ForConditionalGeneration");

/// Keys that say how images become tokens.
const OF_IMAGES: [&str; 8] = [
    "boi_token_id",
    "boi_token_index",
    "eoi_token_id",
    "eoi_token_index",
    "image_token_id",
    "image_token_index",
    "mm_tokens_per_image",
    "vision_config",
];

/// Sizes of transformers' `Gemma3TextConfig`, which published files leave out.
const DEFAULTS: [(&str, usize); 9] = [
    ("vocab_size", 262_208),
    ("hidden_size", 2304),
    ("intermediate_size", 9216),
    ("num_hidden_layers", 26),
    ("num_attention_heads", 8),
    ("num_key_value_heads", 4),
    ("head_dim", 256),
    ("max_position_embeddings", 131_072),
    ("sliding_window", 4096),
];

/// The `config.json` of the language model (`gemma3_text`), if the file is of a Gemma 3 with images.
///
/// # Errors
/// Names the key that is missing, unknown, or contradicts the language model's.
pub(crate) fn language_model(config: &Value) -> Result<Option<Value>, HfError> {
    let reader = ConfigReader::new(config)?;
    if reader.text("model_type")? != Some(WHOLE.model_type) {
        return Ok(None);
    }
    reader.expect_model(WHOLE)?;
    let text = reader.object("text_config")?.ok_or_else(|| HfError::Missing { key: "text_config".into() })?;
    text.expect_or_absent("model_type", "gemma3_text").map_err(|error| error.inside("text_config"))?;
    let tied = text.flag_or("tie_word_embeddings", true).map_err(|error| error.inside("text_config"))?;
    reader.expect_flag("tie_word_embeddings", tied)?;
    // Of all weights; the language model's own is in `text_config` where it is another one.
    reader.number("initializer_range")?;
    reader.finish(&OF_IMAGES)?;
    // What says how to store and use the whole is the language model's too, and counts where both say it.
    let shared = |key: &str| key == "quantization_config" || HARMLESS.contains(&key);
    let whole = config.as_object().into_iter().flatten().filter(|(key, value)| shared(key) && !value.is_null());
    let mut keys: Map<String, Value> = DEFAULTS.iter().map(|(key, size)| (key.to_string(), json!(size))).collect();
    keys.extend(config["text_config"].as_object().cloned().unwrap_or_default());
    keys.extend(whole.map(|(key, value)| (key.clone(), value.clone())));
    keys.insert("architectures".into(), json!(["Gemma3ForCausalLM"]));
    keys.insert("model_type".into(), json!("gemma3_text"));
    Ok(Some(Value::Object(keys)))
}

/// What a tensor of a Gemma 3 with images is called in a file of its language model; `None` is a tensor for images. The names
/// are those of published files (`language_model.model.`) or of transformers in memory (`model.language_model.`).
pub fn name_in_language_model(name: &str) -> Option<Cow<'_, str>> {
    const IMAGES: [&str; 2] = ["vision_tower.", "multi_modal_projector."];
    const RENAMED: [(&str, &str); 3] = [
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
    ];
    let inside = name.strip_prefix("model.").unwrap_or(name);
    if IMAGES.iter().any(|part| inside.starts_with(part)) {
        return None;
    }
    let renamed = RENAMED.iter().find_map(|(theirs, ours)| Some(format!("{ours}{}", name.strip_prefix(theirs)?)));
    Some(renamed.map_or(Cow::Borrowed(name), Cow::Owned))
}

/// Whether a `config.json` is of a Gemma 3 with images: names in its files are read by [`name_in_language_model`].
pub fn has_images(config: &Value) -> bool {
    config["model_type"] == WHOLE.model_type
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_both_kinds_are_those_of_the_language_model() {
        fn called(name: &str) -> Option<String> {
            name_in_language_model(name).map(Cow::into_owned)
        }
        let own = Some("model.layers.3.mlp.up_proj.weight".to_string());
        assert_eq!(called("language_model.model.layers.3.mlp.up_proj.weight"), own);
        assert_eq!(called("model.language_model.layers.3.mlp.up_proj.weight"), own);
        assert_eq!(called("language_model.lm_head.weight").as_deref(), Some("lm_head.weight"));
        assert_eq!(called("lm_head.weight").as_deref(), Some("lm_head.weight"));
        for image in ["vision_tower.vision_model.post_layernorm.bias", "multi_modal_projector.mm_soft_emb_norm.weight"]
        {
            assert_eq!((called(image), called(&format!("model.{image}"))), (None, None), "{image}");
        }
    }

    #[test]
    fn keys_are_the_language_models_and_what_it_leaves_out_its_defaults() {
        let file = json!({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106],
            "vision_config": {"image_size": 896}, "text_config": {"hidden_size": 2560, "eos_token_id": 1}});
        let text = language_model(&file).unwrap().unwrap();
        assert_eq!((&text["hidden_size"], &text["vocab_size"]), (&json!(2560), &json!(262_208)));
        assert_eq!((&text["model_type"], &text["eos_token_id"]), (&json!("gemma3_text"), &json!([1, 106])));
        assert_eq!(language_model(&text), Ok(None));
        let refused = |key: &str, value: Value| {
            let mut file = file.clone();
            file[key] = value;
            language_model(&file).unwrap_err().to_string()
        };
        assert_eq!(refused("text_config", Value::Null), "config.json: `text_config` is missing");
        assert!(refused("audio_config", json!({})).contains("`audio_config` is not a key that this model knows"));
        assert!(refused("text_config", json!({"model_type": "llama"})).contains("`text_config.model_type` is llama"));
        assert!(refused("tie_word_embeddings", json!(false)).contains("nearest legal: true"));
        assert!(refused("architectures", json!(["Gemma3Model"])).contains("supported: gemma3 (Gemma3ForCond"));
    }
}
