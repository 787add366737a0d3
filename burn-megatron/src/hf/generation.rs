//! `generation_config.json`: how a model's author suggests to sample from it.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::error::HfFolderError;

/// What a generation may take from `generation_config.json`; absent keys are `None`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct GenerationConfig {
    /// First token of every text.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a text.
    #[serde(deserialize_with = "one_or_more")]
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
    /// Reads the file, or takes `bos_token_id` and `eos_token_id` of `config` where there is none.
    pub(super) fn read(folder: &Path, config: &Value) -> Result<Self, HfFolderError> {
        let path = folder.join("generation_config.json");
        let json = |source| HfFolderError::Json { path: path.clone(), source };
        match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(json),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let ids = ["bos_token_id", "eos_token_id"].iter().filter_map(|key| Some((*key, config.get(key)?)));
                let ids: serde_json::Map<_, _> = ids.map(|(key, value)| (key.to_string(), value.clone())).collect();
                let path = folder.join("config.json");
                serde_json::from_value(ids.into()).map_err(|source| HfFolderError::Json { path, source })
            }
            Err(error) => Err(HfFolderError::io("read", &path)(error)),
        }
    }
}

fn one_or_more<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<u32>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Ids {
        One(u32),
        More(Vec<u32>),
    }
    Ok(match Option::<Ids>::deserialize(deserializer)? {
        None => Vec::new(),
        Some(Ids::One(id)) => vec![id],
        Some(Ids::More(ids)) => ids,
    })
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
        assert_eq!((found.eos_token_id, found.temperature, found.top_p), (vec![5, 6], Some(0.6), Some(0.9)));
    }
}
