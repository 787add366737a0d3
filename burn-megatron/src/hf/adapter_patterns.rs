//! Ranks and scales of their own that an `adapter_config.json` gives modules: regular expressions of the ends of their names, as
//! peft's `get_pattern_key` tells them.

use std::collections::BTreeMap;

use models::lora::{LoraConfig, LoraError};
use models::names::NameMap;
use regex::Regex;
use serde_json::Value;

use super::adapter_targets::expression;

/// The values of `rank_pattern` and `alpha_pattern`.
#[derive(Debug)]
pub(super) struct Patterns {
    ranks: Vec<(String, Regex, usize)>,
    alphas: Vec<(String, Regex, f64)>,
}

impl Patterns {
    /// Reads the keys of a file.
    ///
    /// # Errors
    /// Names the key with no expression, or no number.
    pub(super) fn read(json: &Value) -> Result<Self, String> {
        let rank = |value: &Value| value.as_u64().map(|rank| rank as usize);
        let (ranks, alphas) = (table(json, "rank_pattern", rank)?, table(json, "alpha_pattern", Value::as_f64)?);
        Ok(Self { ranks, alphas })
    }

    /// Rank and numerator of the scale that a parameter of this name has of its own.
    pub(super) fn own(&self, name: &str) -> (Option<usize>, Option<f64>) {
        let rank = self.ranks.iter().find(|(_, expression, _)| expression.is_match(name)).map(|(.., rank)| *rank);
        (rank, self.alphas.iter().find(|(_, expression, _)| expression.is_match(name)).map(|(.., alpha)| *alpha))
    }

    /// `config` with the values of the modules that it means.
    ///
    /// # Errors
    /// If it means no module, or two expressions fit one: peft takes the first in the file.
    pub(super) fn of(&self, config: LoraConfig, names: &NameMap) -> Result<LoraConfig, LoraError> {
        if self.ranks.is_empty() && self.alphas.is_empty() {
            return Ok(config);
        }
        let plan = config.plan(names)?;
        let modules: Vec<&str> = plan.modules().into_keys().collect();
        let rank_pattern = of_modules("rank_pattern", &self.ranks, &modules)?;
        let alpha_pattern = of_modules("alpha_pattern", &self.alphas, &modules)?;
        Ok(LoraConfig { rank_pattern, alpha_pattern, ..config })
    }
}

type Table<T> = Vec<(String, Regex, T)>;

fn table<T>(json: &Value, key: &str, number: impl Fn(&Value) -> Option<T>) -> Result<Table<T>, String> {
    let Some(entries) = json[key].as_object() else { return Ok(Vec::new()) };
    let entry = |(pattern, value): (&String, &Value)| {
        let number =
            number(value).ok_or_else(|| format!("{key}: {pattern} = {value} is not a number of at least 1"))?;
        Ok((pattern.clone(), expression(key, pattern, &format!(r"^(?:.*\.)?(?:{pattern})$"))?, number))
    };
    entries.iter().map(entry).collect()
}

fn of_modules<T: Copy + PartialEq>(
    key: &'static str,
    table: &Table<T>,
    modules: &[&str],
) -> Result<BTreeMap<String, T>, LoraError> {
    let mut found = BTreeMap::new();
    for module in modules {
        let mut fits = table.iter().filter(|(_, expression, _)| expression.is_match(module));
        let Some((first, _, value)) = fits.next() else { continue };
        // The order of a JSON object's keys is not read.
        if let Some((second, ..)) = fits.find(|(.., other)| other != value) {
            let patterns = [first.clone(), second.clone()];
            return Err(LoraError::Twice { key, patterns, module: module.to_string() });
        }
        found.insert(module.to_string(), *value);
    }
    Ok(found)
}
