//! Typed access to an object of a `config.json`, which remembers the keys that were asked for.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::{HARMLESS, HfArchitecture, HfError, module_classes, says_nothing};
use crate::limits::limit;

/// The method of quantisation that any model's linear layers may have: which tensors have it, the files say themselves.
const COMPRESSED: &str = "compressed-tensors";

/// An object of a `config.json`.
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
    pub fn expect_model(&self, of: HfArchitecture) -> Result<(), HfError> {
        self.expect("model_type", of.model_type)?;
        let Some(classes) = self.texts("architectures")? else { return Ok(()) };
        if classes.iter().all(|class| *class == of.class) {
            return Ok(());
        }
        Err(HfError::Architecture { key: "architectures", value: classes.join(", "), supported: of.to_string() })
    }

    /// Checks `model_type` and gives `architectures` of a plain Burn module: its first class if they are not given.
    pub fn expect_module(&self, kind: &'static str) -> Result<Vec<&'a str>, HfError> {
        self.expect("model_type", kind)?;
        let legal = module_classes(kind).unwrap_or_default();
        let classes = self.texts("architectures")?.unwrap_or_else(|| legal.iter().take(1).copied().collect());
        match classes.iter().find(|class| !legal.contains(class)) {
            None => Ok(classes),
            Some(class) => Err(self.unsupported("architectures", class, &legal.join(", "))),
        }
    }

    /// Refuses keys that nobody asked for and that are not harmless, here or everywhere.
    pub fn finish(&self, harmless: &[&str]) -> Result<(), HfError> {
        let asked = self.asked.borrow();
        let quantised = self.object.get("quantization_config").filter(|config| !config.is_null());
        if let Some(quantised) = quantised.filter(|_| !asked.contains("quantization_config")) {
            let method = quantised.get("quant_method").and_then(Value::as_str).unwrap_or("some other type");
            if method != COMPRESSED {
                return Err(HfError::Quantised { method: method.into() });
            }
            check_compressed(quantised)?;
        }
        let passed_over = |key: &str| {
            let anywhere =
                HARMLESS.contains(&key) || key == "quantization_config" || says_nothing(key, &self.object[key]);
            anywhere || harmless.contains(&key)
        };
        match self.object.keys().find(|key| !asked.contains(*key) && !passed_over(key)) {
            None => Ok(()),
            Some(key) => {
                let known = asked.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
                let harmless = [harmless, &HARMLESS].concat().join(", ");
                Err(HfError::Unknown { key: key.clone(), known, harmless })
            }
        }
    }

    /// Weights may be stored by this method too, which is known to whoever reads them.
    pub fn quantisation(&self, legal: &str) -> Result<(), HfError> {
        let Some(quantised) = self.object("quantization_config")? else { return Ok(()) };
        let method = quantised.text("quant_method")?.unwrap_or("some other type");
        if method == COMPRESSED {
            return check_compressed(&self.object["quantization_config"]);
        }
        if method != legal {
            return Err(HfError::Quantised { method: method.into() });
        }
        // Blocks of FP8 are those of DeepSeek-V3; the other keys do not say how weights are stored.
        match quantised.indices("weight_block_size")? {
            Some(block) if block != [128, 128] => {
                Err(quantised.unsupported("weight_block_size", &format!("{block:?}"), "[128, 128]"))
            }
            _ => quantised.expect_or_absent("fmt", "e4m3"),
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
        let read = |value: &Value| value.as_u64().filter(|size| *size > 0);
        self.typed(key, "a positive integer", read)?.map(|size| within(key, size)).transpose()
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

    /// A list of integers from zero, if present.
    pub fn indices(&self, key: &str) -> Result<Option<Vec<usize>>, HfError> {
        let read = |value: &Value| value.as_array()?.iter().map(Value::as_u64).collect::<Option<Vec<_>>>();
        let list = self.typed(key, "a list of integers from 0", read)?;
        list.map(|list| list.into_iter().map(|index| within(key, index)).collect()).transpose()
    }

    /// An integer from zero, with a default.
    pub fn count_or(&self, key: &str, default: usize) -> Result<usize, HfError> {
        let count = self.typed(key, "an integer from 0", Value::as_u64)?;
        count.map_or(Ok(default), |count| within(key, count))
    }

    /// A list of numbers that must be present.
    pub fn numbers(&self, key: &str) -> Result<Vec<f64>, HfError> {
        let read = |value: &Value| value.as_array()?.iter().map(Value::as_f64).collect();
        self.typed(key, "a list of numbers", read)?.ok_or_else(|| HfError::Missing { key: key.into() })
    }

    /// Two numbers, of which each may be infinite, if present. transformers writes infinity as an object.
    pub fn limits(&self, key: &str) -> Result<Option<[f64; 2]>, HfError> {
        let number = |value: &Value| match value.get("__float__").and_then(Value::as_str) {
            Some("Infinity") => Some(f64::INFINITY),
            _ => value.as_f64(),
        };
        let read = |value: &Value| value.as_array()?.iter().map(number).collect::<Option<Vec<_>>>()?.try_into().ok();
        self.typed(key, "a list of two numbers", read)
    }

    /// A string, if present.
    pub fn text(&self, key: &str) -> Result<Option<&'a str>, HfError> {
        self.typed(key, "a string", Value::as_str)
    }

    /// An object, if present.
    pub fn object(&self, key: &str) -> Result<Option<ConfigReader<'a>>, HfError> {
        Ok(self.typed(key, "an object", Value::as_object)?.map(ConfigReader::of))
    }

    /// How many keys an object has, if it is there and has any.
    pub fn map_len(&self, key: &str) -> Result<Option<usize>, HfError> {
        let keys = self.typed(key, "an object", |value| value.as_object().map(Map::len))?;
        Ok(keys.filter(|keys| *keys > 0))
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

    /// Whether the sigmoids of a token's `top_k` experts are brought to a sum of one. One alone would become 1 whatever it
    /// was in transformers, and stay as it is in DeepSeek's own code.
    pub fn norm_topk_prob(&self, top_k: usize) -> Result<bool, HfError> {
        let is_normalised = self.flag_or("norm_topk_prob", true)?;
        if is_normalised && top_k == 1 {
            return Err(self.unsupported("norm_topk_prob", "true with one expert for each token", "false"));
        }
        Ok(is_normalised)
    }
}

/// Refuses numbers that the sizes of tensors do not tell from those that are read: integers of 7 bits lie in words as those
/// of 8 do.
fn check_compressed(quantised: &Value) -> Result<(), HfError> {
    for (name, group) in quantised["config_groups"].as_object().into_iter().flatten() {
        for (key, legal) in [("num_bits", &[json!(4), json!(8)][..]), ("symmetric", &[json!(true)])] {
            let value = &group["weights"][key];
            if !value.is_null() && !legal.contains(value) {
                let key = format!("quantization_config.config_groups.{name}.weights.{key}");
                let legal = legal.iter().map(Value::to_string).collect::<Vec<_>>().join(", ");
                return Err(HfError::Unsupported { key, value: value.to_string(), legal });
            }
        }
    }
    Ok(())
}

/// A size that is not beyond its key's limit.
fn within(key: &str, size: u64) -> Result<usize, HfError> {
    let most = limit(key);
    match usize::try_from(size) {
        Ok(size) if size as u64 <= most => Ok(size),
        _ => Err(HfError::TooLarge { key: key.into(), value: size, most }),
    }
}

fn wrong_type(key: &str, value: &Value, expected: &'static str) -> HfError {
    HfError::Type { key: key.into(), value: value.to_string(), expected }
}
