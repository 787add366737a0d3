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
}

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
        })
    }
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
}
