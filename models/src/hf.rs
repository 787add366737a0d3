//! Reading and writing Hugging Face's `config.json`. Every key of a file is used, known not to change what the model
//! computes, or refused by name.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde_json::{Map, Value};
use thiserror::Error;

use crate::family::FamilyConfig;
use crate::{GptConfig, LlamaConfig, LlamaVariant};

/// Why a `config.json` cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum HfError {
    /// A key is missing.
    #[error("config.json: `{key}` is missing")]
    Missing {
        /// The key.
        key: String,
    },
    /// A value has the wrong type.
    #[error("config.json: `{key}` is {value}, not {expected}")]
    Type {
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// What was expected.
        expected: &'static str,
    },
    /// The file describes a model that is not here.
    #[error("config.json: there is no model for `{key}` {value}; supported: {}", supported())]
    Architecture {
        /// `model_type` or `architectures`.
        key: &'static str,
        /// Its value.
        value: String,
    },
    /// A key is neither used nor known to be harmless.
    #[error(
        "config.json: `{key}` is not a key that this model knows, and it might change what the model computes; known: \
         {known}; known to change nothing: {harmless}"
    )]
    Unknown {
        /// The key.
        key: String,
        /// Keys that are used.
        known: String,
        /// Keys that are passed over.
        harmless: String,
    },
    /// The configuration asks for something the model does not do.
    #[error("config.json: `{key}` is {value}, which this model does not have; nearest legal: {legal}")]
    Unsupported {
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// Values that would do.
        legal: String,
    },
}

/// Hugging Face's `model_type` and `architectures` of the models that we have.
const ARCHITECTURES: [(&str, &str); 4] = [
    ("llama", "LlamaForCausalLM"),
    ("mistral", "MistralForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
    ("gpt2", "GPT2LMHeadModel"),
];

/// Keys that say how to use, store or describe a model, not what it computes.
const HARMLESS: [&str; 37] = [
    "_attn_implementation_autoset",
    "_name_or_path",
    "bos_token_id",
    "do_sample",
    "dtype",
    "early_stopping",
    "eos_token_id",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "prefix",
    "problem_type",
    "repetition_penalty",
    "return_dict",
    "sep_token_id",
    "task_specific_params",
    "temperature",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "use_cache",
];

fn supported() -> String {
    ARCHITECTURES.map(|(kind, class)| format!("{kind} ({class})")).join(", ")
}

/// Hugging Face's class of a `model_type`.
pub(crate) fn class_of(kind: &str) -> Option<&'static str> {
    ARCHITECTURES.iter().find(|(known, _)| *known == kind).map(|(_, class)| *class)
}

impl FamilyConfig {
    /// Reads the `config.json` of any model that we have.
    ///
    /// # Errors
    /// Names the architecture or the key that we do not have, and what is legal.
    pub fn from_hf(config: &Value) -> Result<Self, HfError> {
        let reader = ConfigReader::new(config)?;
        let kind = reader.text("model_type")?.ok_or_else(|| HfError::Missing { key: "model_type".into() })?;
        match kind {
            "llama" => LlamaConfig::from_hf(config, LlamaVariant::Llama).map(Self::Llama),
            "mistral" => LlamaConfig::from_hf(config, LlamaVariant::Mistral).map(Self::Llama),
            "qwen3" => LlamaConfig::from_hf(config, LlamaVariant::Qwen3).map(Self::Llama),
            "gpt2" => GptConfig::from_hf(config).map(Self::Gpt),
            other => Err(HfError::Architecture { key: "model_type", value: other.into() }),
        }
    }

    /// The `config.json` of this model, in the form of transformers 5.
    ///
    /// # Errors
    /// If Hugging Face's model cannot say what this one does.
    pub fn to_hf(&self) -> Result<Value, HfError> {
        match self {
            Self::Llama(config) => Ok(config.to_hf()),
            Self::Gpt(config) => config.to_hf(),
        }
    }

    /// The `config.json` of this model, which was once read from `original`: the same file if the model is still that
    /// one, else a new file with the harmless keys of the old one (token ids, for example).
    ///
    /// # Errors
    /// As [`FamilyConfig::to_hf`].
    pub fn to_hf_like(&self, original: &Value) -> Result<Value, HfError> {
        let mut written = self.to_hf()?;
        if Self::from_hf(original).is_ok_and(|config| config.to_hf().is_ok_and(|same| same == written)) {
            return Ok(original.clone());
        }
        let (Some(written_keys), Some(keys)) = (written.as_object_mut(), original.as_object()) else {
            return Ok(written);
        };
        for (key, value) in keys.iter().filter(|(key, _)| HARMLESS.contains(&key.as_str())) {
            written_keys.insert(key.clone(), value.clone());
        }
        Ok(written)
    }
}

/// Typed access to an object of a `config.json`, which remembers the keys that were asked for.
pub(crate) struct ConfigReader<'a> {
    object: &'a Map<String, Value>,
    asked: RefCell<BTreeSet<String>>,
}

impl<'a> ConfigReader<'a> {
    pub fn new(value: &'a Value) -> Result<Self, HfError> {
        let object = value.as_object().ok_or_else(|| wrong_type("the file", value, "an object"))?;
        Ok(Self::of(object))
    }

    fn of(object: &'a Map<String, Value>) -> Self {
        Self { object, asked: RefCell::default() }
    }

    /// Checks `model_type` and, if they are given, `architectures`.
    pub fn expect_model(&self, kind: &'static str) -> Result<(), HfError> {
        self.expect("model_type", kind)?;
        let Some(classes) = self.texts("architectures")? else { return Ok(()) };
        match classes.iter().all(|class| class_of(kind) == Some(*class)) {
            true => Ok(()),
            false => Err(HfError::Architecture { key: "architectures", value: classes.join(", ") }),
        }
    }

    /// Refuses keys that nobody asked for and that are not harmless, here or everywhere.
    pub fn finish(&self, harmless: &[&str]) -> Result<(), HfError> {
        let asked = self.asked.borrow();
        let passed_over = |key: &str| harmless.contains(&key) || HARMLESS.contains(&key);
        match self.object.keys().find(|key| !asked.contains(*key) && !passed_over(key)) {
            None => Ok(()),
            Some(key) => {
                let known = asked.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
                let harmless = [harmless, &HARMLESS].concat().join(", ");
                Err(HfError::Unknown { key: key.clone(), known, harmless })
            }
        }
    }

    /// Whether a key is there, be it `null`.
    pub fn has(&self, key: &str) -> bool {
        self.object.contains_key(key)
    }

    /// The value of a key; `null` is the same as absent.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.asked.borrow_mut().insert(key.to_string());
        self.object.get(key).filter(|value| !value.is_null())
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &'static str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, HfError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| wrong_type(key, value, expected))
    }

    /// A positive integer, if present.
    pub fn optional_size(&self, key: &str) -> Result<Option<usize>, HfError> {
        let read = |value: &Value| value.as_u64().filter(|size| *size > 0).and_then(|size| usize::try_from(size).ok());
        self.typed(key, "a positive integer", read)
    }

    /// A positive integer that must be present.
    pub fn size(&self, key: &str) -> Result<usize, HfError> {
        self.optional_size(key)?.ok_or_else(|| HfError::Missing { key: key.into() })
    }

    /// A positive integer with a default.
    pub fn size_or(&self, key: &str, default: usize) -> Result<usize, HfError> {
        Ok(self.optional_size(key)?.unwrap_or(default))
    }

    /// A number, if present.
    pub fn number(&self, key: &str) -> Result<Option<f64>, HfError> {
        self.typed(key, "a number", Value::as_f64)
    }

    /// A number that must be present.
    pub fn required_number(&self, key: &str) -> Result<f64, HfError> {
        self.number(key)?.ok_or_else(|| HfError::Missing { key: key.into() })
    }

    /// A truth value, false if absent.
    pub fn flag(&self, key: &str) -> Result<bool, HfError> {
        self.flag_or(key, false)
    }

    /// A truth value with a default.
    pub fn flag_or(&self, key: &str, default: bool) -> Result<bool, HfError> {
        Ok(self.typed(key, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    /// A list of strings, if present.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, HfError> {
        let read = |value: &'a Value| value.as_array()?.iter().map(Value::as_str).collect();
        self.typed(key, "a list of strings", read)
    }

    /// A string, if present.
    pub fn text(&self, key: &str) -> Result<Option<&'a str>, HfError> {
        self.typed(key, "a string", Value::as_str)
    }

    /// An object, if present.
    pub fn object(&self, key: &str) -> Result<Option<ConfigReader<'a>>, HfError> {
        Ok(self.typed(key, "an object", Value::as_object)?.map(ConfigReader::of))
    }

    /// A string that must be the given one.
    pub fn expect(&self, key: &str, legal: &str) -> Result<(), HfError> {
        let found = self.text(key)?.ok_or_else(|| HfError::Missing { key: key.into() })?;
        if found == legal { Ok(()) } else { Err(self.unsupported(key, found, legal)) }
    }

    /// A string that must be the given one if it is there.
    pub fn expect_or_absent(&self, key: &str, legal: &str) -> Result<(), HfError> {
        if self.get(key).is_none() { Ok(()) } else { self.expect(key, legal) }
    }

    /// A number that must be the given one if it is there.
    pub fn expect_number(&self, key: &str, default: f64, legal: f64) -> Result<(), HfError> {
        let found = self.number(key)?.unwrap_or(default);
        if found == legal { Ok(()) } else { Err(self.unsupported(key, &found.to_string(), &legal.to_string())) }
    }

    /// A truth value that must be the given one if it is there.
    pub fn expect_flag(&self, key: &str, legal: bool) -> Result<(), HfError> {
        let found = self.flag_or(key, legal)?;
        if found == legal { Ok(()) } else { Err(self.unsupported(key, &found.to_string(), &legal.to_string())) }
    }

    /// An error for a value that the model does not have.
    pub fn unsupported(&self, key: &str, value: &str, legal: &str) -> HfError {
        HfError::Unsupported { key: key.into(), value: value.into(), legal: legal.into() }
    }
}

fn wrong_type(key: &str, value: &Value, expected: &'static str) -> HfError {
    HfError::Type { key: key.into(), value: value.to_string(), expected }
}
