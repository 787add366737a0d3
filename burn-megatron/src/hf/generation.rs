//! `generation_config.json`: how a model's author suggests to sample from it.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tokenizers::Tokenizer;

use super::error::HfFolderError;
use crate::data::chat::{ChatError, special_token};
use crate::logits::LogitsProcessors;

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
    /// Only the likeliest tokens are drawn from whose terms stay within this share of the entropy.
    pub top_h: Option<f64>,
    /// Only the tokens are drawn from whose surprise is nearest to the entropy, and that make up this share together.
    pub typical_p: Option<f64>,
    /// Only tokens are drawn that have at least this probability.
    pub epsilon_cutoff: Option<f64>,
    /// The same, less where the entropy is high.
    pub eta_cutoff: Option<f64>,
    /// Logits of tokens in prompt and text are divided by this, negative ones multiplied.
    pub repetition_penalty: Option<f64>,
    /// What else changes logits.
    pub processors: LogitsProcessors,
    /// Other keys with which transformers chooses other tokens, and their values.
    pub unsupported: Vec<(&'static str, Value)>,
}

/// Keys of transformers' `GenerationConfig` (5.24) that change its tokens and are not supported, with the number that changes
/// nothing, if there is one. Nor do `null`, `false` and empty lists.
const UNSUPPORTED: [(&str, Option<f64>); 10] = [
    ("diversity_penalty", Some(0.0)),
    ("force_words_ids", None),
    ("forced_decoder_ids", None),
    ("guidance_scale", Some(1.0)),
    ("num_beam_groups", Some(1.0)),
    ("num_beams", Some(1.0)),
    ("penalty_alpha", Some(0.0)),
    ("stop_strings", None),
    ("token_healing", None),
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
            eos_token_id: ids.map(Ids::all).unwrap_or_default(),
            do_sample: value(path, keys, "do_sample", "true or false")?,
            temperature: value(path, keys, "temperature", "a number")?,
            top_k: value(path, keys, "top_k", "a number of tokens")?,
            top_p: value(path, keys, "top_p", "a number")?,
            min_p: value(path, keys, "min_p", "a number")?,
            top_h: value(path, keys, "top_h", "a number")?,
            typical_p: value(path, keys, "typical_p", "a number")?,
            epsilon_cutoff: value(path, keys, "epsilon_cutoff", "a number")?,
            eta_cutoff: value(path, keys, "eta_cutoff", "a number")?,
            repetition_penalty: value(path, keys, "repetition_penalty", "a number")?,
            processors: processors(path, keys)?,
            unsupported: unsupported(keys),
        })
    }
}

/// The rules of transformers' logits processors.
fn processors(path: &Path, keys: &Map<String, Value>) -> Result<LogitsProcessors, HfFolderError> {
    let count = |key| Ok::<usize, HfFolderError>(value(path, keys, key, "a number of tokens")?.unwrap_or_default());
    let tokens = |key| -> Result<Vec<i64>, HfFolderError> {
        let ids: Option<Ids> = value(path, keys, key, "a token id or a list of them")?;
        Ok(ids.map(Ids::all).unwrap_or_default().into_iter().map(i64::from).collect())
    };
    let sequences = "a list of lists of token ids";
    let decay: Option<(usize, f64)> =
        value(path, keys, "exponential_decay_length_penalty", "a number of tokens and a factor, [start, factor]")?;
    let rules = LogitsProcessors {
        sequence_bias: match keys.get("sequence_bias") {
            Some(Value::Object(empty)) if empty.is_empty() => Vec::new(),
            _ => last_of_each(value(path, keys, "sequence_bias", "a list of [token ids, bias]")?.unwrap_or_default()),
        },
        encoder_repetition_penalty: value(path, keys, "encoder_repetition_penalty", "a number")?
            .filter(|by| *by != 1.0),
        no_repeat_ngram_size: count("no_repeat_ngram_size")?,
        encoder_no_repeat_ngram_size: count("encoder_no_repeat_ngram_size")?,
        bad_words_ids: value(path, keys, "bad_words_ids", sequences)?.unwrap_or_default(),
        min_length: count("min_length")?,
        forced_bos_token_id: value(path, keys, "forced_bos_token_id", "a token id")?,
        forced_eos_token_id: tokens("forced_eos_token_id")?,
        exponential_decay_length_penalty: decay,
        suppress_tokens: tokens("suppress_tokens")?,
        begin_suppress_tokens: tokens("begin_suppress_tokens")?,
        ..LogitsProcessors::default()
    };
    rules.check().map_err(|what| HfFolderError::file(path, what))?;
    Ok(rules.with_min_new_tokens(value(path, keys, "min_new_tokens", "a number of tokens")?))
}

/// As in transformers, of a sequence that is there twice the last bias counts.
fn last_of_each(sequences: Vec<(Vec<i64>, f64)>) -> Vec<(Vec<i64>, f64)> {
    sequences.into_iter().collect::<BTreeMap<_, _>>().into_iter().collect()
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

impl Ids {
    fn all(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::More(ids) => ids,
        }
    }
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
        let found = read(serde_json::json!({ "guidance_scale": 1.5, "num_beams": 4, "stop_strings": ["."] }));
        assert_eq!(
            found.note().unwrap(),
            "note: generation_config.json has guidance_scale = 1.5, num_beams = 4, stop_strings = [\".\"], \
             by which transformers writes other texts: no effect here"
        );
        assert_eq!((found.processors, neutral.processors), Default::default());
    }

    #[test]
    fn rules_of_logits_processors_are_read_or_refused_by_name() {
        let read = |keys: Value| GenerationConfig::of(Path::new("generation_config.json"), keys.as_object().unwrap());
        let found = read(serde_json::json!({
            "sequence_bias": [[[1, 2], 9.0], [[1, 2], -3.5]], "bad_words_ids": [[7], [8, 9]], "forced_eos_token_id": 2,
            "suppress_tokens": [4, 5], "exponential_decay_length_penalty": [15, 1.6], "min_new_tokens": 3, "min_length": 9,
            "typical_p": 0.9, "forced_bos_token_id": 0,
        }));
        let found = found.unwrap();
        let rules = LogitsProcessors {
            sequence_bias: vec![(vec![1, 2], -3.5)],
            bad_words_ids: vec![vec![7], vec![8, 9]],
            forced_eos_token_id: vec![2],
            suppress_tokens: vec![4, 5],
            exponential_decay_length_penalty: Some((15, 1.6)),
            min_new_tokens: 3,
            forced_bos_token_id: Some(0),
            ..LogitsProcessors::default()
        };
        assert_eq!((found.processors, found.typical_p, found.unsupported), (rules, Some(0.9), Vec::new()));
        let refused = |keys| read(keys).unwrap_err().to_string();
        says!(
            refused(serde_json::json!({"bad_words_ids": [3]})),
            "bad_words_ids = [3] is not a list of lists of token ids"
        );
        says!(refused(serde_json::json!({"min_length": -1})), "min_length = -1 is not a number of tokens");
        let penalty = refused(serde_json::json!({"encoder_repetition_penalty": 0}));
        says!(penalty, "encoder_repetition_penalty = 0 is not a number above 0");
    }
}
