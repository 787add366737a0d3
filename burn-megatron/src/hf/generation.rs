//! `generation_config.json`: how a model's author suggests to sample from it.

use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tokenizers::Tokenizer;

use super::error::HfFolderError;
use crate::data::chat::{ChatError, special_token};

/// What a generation may take from `generation_config.json`; absent keys are `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// First token of every text.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a text.
    pub eos_token_id: Vec<u32>,
    /// Whether to draw tokens; without it the likeliest is taken.
    pub do_sample: Option<bool>,
    /// Logits are divided by this before drawing.
    pub temperature: Option<f64>,
    /// Only this many of the likeliest tokens are drawn from.
    pub top_k: Option<usize>,
    /// Only the likeliest tokens are drawn from that make up this share together.
    pub top_p: Option<f64>,
    /// Only tokens are drawn that are at least so many times as likely as the likeliest.
    pub min_p: Option<f64>,
    /// Logits of tokens in prompt and text are divided by this, negative ones multiplied.
    pub repetition_penalty: Option<f64>,
    /// Other keys with which transformers chooses other tokens, and their values.
    pub unsupported: Vec<(&'static str, Value)>,
}

/// Keys of transformers' `GenerationConfig` (5.24) that change its tokens and are not supported, with the number that changes
/// nothing, if there is one. Nor do `null`, `false` and empty lists.
const UNSUPPORTED: [(&str, Option<f64>); 26] = [
    ("bad_words_ids", None),
    ("begin_suppress_tokens", None),
    ("diversity_penalty", Some(0.0)),
    ("encoder_no_repeat_ngram_size", Some(0.0)),
    ("encoder_repetition_penalty", Some(1.0)),
    ("epsilon_cutoff", Some(0.0)),
    ("eta_cutoff", Some(0.0)),
    ("exponential_decay_length_penalty", None),
    ("force_words_ids", None),
    ("forced_bos_token_id", None),
    ("forced_decoder_ids", None),
    ("forced_eos_token_id", None),
    ("guidance_scale", Some(1.0)),
    ("min_length", Some(0.0)),
    ("min_new_tokens", Some(0.0)),
    ("no_repeat_ngram_size", Some(0.0)),
    ("num_beam_groups", Some(1.0)),
    ("num_beams", Some(1.0)),
    ("penalty_alpha", Some(0.0)),
    ("sequence_bias", None),
    ("stop_strings", None),
    ("suppress_tokens", None),
    ("token_healing", None),
    ("top_h", None),
    ("typical_p", Some(1.0)),
    ("watermarking_config", None),
];

impl GenerationConfig {
    /// That of a folder, whose `config.json` need not be there. Fails if a file cannot be read or is wrong.
    pub fn of_folder(folder: &Path) -> Result<Self, HfFolderError> {
        let path = folder.join("config.json");
        let json = |source| HfFolderError::Json { path: path.clone(), source };
        match std::fs::read(&path) {
            Ok(bytes) => Self::read(folder, &serde_json::from_slice(&bytes).map_err(json)?),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Self::read(folder, &Value::Null),
            Err(error) => Err(HfFolderError::io("read", &path)(error)),
        }
    }

    /// What to tell who has texts written: that some keys have no effect.
    pub fn note(&self) -> Option<String> {
        let keys: Vec<String> = self.unsupported.iter().map(|(key, value)| format!("{key} = {value}")).collect();
        (!keys.is_empty()).then(|| {
            format!(
                "note: generation_config.json has {}, by which transformers writes other texts: no effect here",
                keys.join(", ")
            )
        })
    }

    /// Tokens before a text, the best first.
    pub fn prefixes(&self) -> Vec<u32> {
        self.bos_token_id.into_iter().chain(self.eos_token_id.iter().copied()).collect()
    }

    /// Tokens that end a text: those of the model, and the `eos_token` of the tokenizer, which ends an assistant's turn
    /// where only the tokenizer's files were changed for that.
    ///
    /// # Errors
    /// If a file of the tokenizer in `folder` cannot be read.
    pub fn stop_tokens(&self, folder: &Path, tokenizer: &Tokenizer) -> Result<Vec<i64>, ChatError> {
        let own = special_token(folder, "eos_token")?.and_then(|token| tokenizer.token_to_id(&token));
        let own = own.filter(|id| !self.eos_token_id.contains(id));
        Ok(self.eos_token_id.iter().copied().chain(own).map(i64::from).collect())
    }

    /// Reads the file, or takes `bos_token_id` and `eos_token_id` of `config` where there is none.
    pub(super) fn read(folder: &Path, config: &Value) -> Result<Self, HfFolderError> {
        let path = folder.join("generation_config.json");
        let json = |source| HfFolderError::Json { path: path.clone(), source };
        match std::fs::read(&path) {
            Ok(bytes) => Self::of(&path, &serde_json::from_slice(&bytes).map_err(json)?),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let ids = ["bos_token_id", "eos_token_id"].iter().filter_map(|key| Some((*key, config.get(key)?)));
                let ids: Map<_, _> = ids.map(|(key, value)| (key.to_string(), value.clone())).collect();
                Self::of(&folder.join("config.json"), &ids)
            }
            Err(error) => Err(HfFolderError::io("read", &path)(error)),
        }
    }

    /// From the object of a file.
    fn of(path: &Path, keys: &Map<String, Value>) -> Result<Self, HfFolderError> {
        let ids = value::<Ids>(path, keys, "eos_token_id", "a token id or a list of them")?;
        Ok(Self {
            bos_token_id: value(path, keys, "bos_token_id", "a token id")?,
            eos_token_id: match ids {
                None => Vec::new(),
                Some(Ids::One(id)) => vec![id],
                Some(Ids::More(ids)) => ids,
            },
            do_sample: value(path, keys, "do_sample", "true or false")?,
            temperature: value(path, keys, "temperature", "a number")?,
            top_k: value(path, keys, "top_k", "a number of tokens")?,
            top_p: value(path, keys, "top_p", "a number")?,
            min_p: value(path, keys, "min_p", "a number")?,
            repetition_penalty: value(path, keys, "repetition_penalty", "a number")?,
            unsupported: unsupported(keys),
        })
    }
}

fn unsupported(keys: &Map<String, Value>) -> Vec<(&'static str, Value)> {
    let changes = |value: &Value, neutral: Option<f64>| match value {
        Value::Null | Value::Bool(false) => false,
        Value::Array(values) => !values.is_empty(),
        Value::Object(values) => !values.is_empty(),
        value => neutral.is_none() || value.as_f64() != neutral,
    };
    let of = |(key, neutral): (&'static str, Option<f64>)| {
        keys.get(key).filter(|value| changes(value, neutral)).map(|value| (key, value.clone()))
    };
    UNSUPPORTED.into_iter().filter_map(of).collect()
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    One(u32),
    More(Vec<u32>),
}

/// The value of a key; `null` is the same as absent.
fn value<T: DeserializeOwned>(
    path: &Path,
    keys: &Map<String, Value>,
    key: &str,
    expected: &str,
) -> Result<Option<T>, HfFolderError> {
    let Some(found) = keys.get(key) else { return Ok(None) };
    let wrong = |_| HfFolderError::file(path, format!("{key} = {found} is not {expected}"));
    Option::<T>::deserialize(found).map_err(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_stop_token_or_several() {
        let folder = tempfile::tempdir().unwrap();
        let read = |config: Value| GenerationConfig::read(folder.path(), &config).unwrap();
        let from_config = read(serde_json::json!({"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 7}));
        assert_eq!(
            from_config,
            GenerationConfig { bos_token_id: Some(1), eos_token_id: vec![2], ..Default::default() }
        );
        let text =
            r#"{"eos_token_id": [5, 6], "bos_token_id": null, "temperature": 0.6, "top_p": 0.9, "use_cache": true}"#;
        std::fs::write(folder.path().join("generation_config.json"), text).unwrap();
        let found = read(Value::Null);
        assert_eq!((&found.eos_token_id[..], found.temperature, found.top_p), (&[5, 6][..], Some(0.6), Some(0.9)));
        let vocab =
            r#"{"model": {"type": "WordLevel", "vocab": {"a": 0, "<|im_end|>": 6, "</s>": 7}, "unk_token": "a"}}"#;
        let tokenizer = Tokenizer::from_bytes(vocab).unwrap();
        for (own, expected) in [("</s>", &[5, 6, 7][..]), ("<|im_end|>", &[5, 6]), ("<unknown>", &[5, 6])] {
            let json = serde_json::json!({ "eos_token": own }).to_string();
            std::fs::write(folder.path().join("tokenizer_config.json"), json).unwrap();
            assert_eq!(found.stop_tokens(folder.path(), &tokenizer).unwrap(), expected, "{own}");
        }
    }

    #[test]
    fn keys_without_effect_are_named_unless_they_change_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let read = |config: Value| {
            std::fs::write(folder.path().join("generation_config.json"), config.to_string()).unwrap();
            GenerationConfig::read(folder.path(), &Value::Null).unwrap()
        };
        let neutral = read(serde_json::json!({
            "repetition_penalty": 1.2, "min_p": 0.1, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0,
            "no_repeat_ngram_size": 0, "suppress_tokens": [], "bad_words_ids": null, "num_beams": 1, "min_length": 0,
            "token_healing": false, "max_new_tokens": 2048, "use_cache": true, "sequence_bias": {},
        }));
        assert_eq!((neutral.repetition_penalty, neutral.min_p, neutral.note()), (Some(1.2), Some(0.1), None));
        let found = read(serde_json::json!({
            "typical_p": 0.9, "suppress_tokens": [1, 2], "forced_bos_token_id": 0, "num_beams": 4, "min_new_tokens": 5,
        }));
        assert_eq!(
            found.note().unwrap(),
            "note: generation_config.json has forced_bos_token_id = 0, min_new_tokens = 5, num_beams = 4, suppress_tokens = [1,2], \
             typical_p = 0.9, by which transformers writes other texts: no effect here"
        );
    }
}
