//! A resolved configuration as TOML with the meaning of every key. Reading it again gives the same configuration.

use std::fmt::Write;

use models::FamilyConfig;
use serde_json::Value;

use super::foreign::{belongs, decided, decider, words};
use super::keys::KEYS;
use super::kind::NONE;
use super::model::{kebab, sizes};
use super::run::RunConfig;
use super::sections::{SECTIONS, is_of_modules};

/// Column of the comments.
const COMMENT: usize = 44;

impl RunConfig {
    /// The configuration as TOML.
    pub fn to_toml(&self) -> String {
        let values = serde_json::to_value(self).expect("plain data");
        let mut text = String::new();
        for (section, doc) in SECTIONS.into_iter().filter(|(section, _)| !is_of_modules(section)) {
            let _ = write!(text, "{}# {doc}\n[{section}]\n", if text.is_empty() { "" } else { "\n" });
            for key in KEYS.iter().filter(|key| key.section() == section && !key.is_resolved_away()) {
                if has_meaning(key.path, &values) {
                    line(&mut text, key.name(), &values[section][key.name()], key.doc);
                }
            }
            if section == "model" {
                let sizes = sizes(&self.model.config);
                for (name, doc) in FamilyConfig::sizes() {
                    if let Some(value) = sizes.get(name) {
                        line(&mut text, &kebab(name), value, &doc);
                    }
                }
            }
        }
        text
    }
}

/// Whether the values of other keys leave a key a meaning.
pub(super) fn has_meaning(path: &str, values: &Value) -> bool {
    let value = |path: &str| {
        let (section, name) = path.split_once('.').unwrap_or_default();
        words(&values[section][name])
    };
    decider(path).is_none_or(|decider| belongs(path, &decided(decider, value)))
}

pub(super) fn line(text: &mut String, name: &str, value: &Value, doc: &str) {
    let value = match value {
        Value::Null => format!("\"{NONE}\""),
        // In one line, as keys are compared between processes; what JSON escapes reads the same in TOML.
        Value::String(text) if text.contains('\n') => Value::from(text.as_str()).to_string(),
        // A number beyond TOML's range, which no check accepts, is shown as a text.
        value => toml::Value::try_from(without_nothing(value))
            .map_or_else(|_| format!("\"{value}\""), |value| value.to_string()),
    };
    let assignment = format!("{name} = {value}");
    let _ = writeln!(text, "{assignment:<COMMENT$} # {doc}");
}

/// TOML has no null: fields of a table that are null are left out.
fn without_nothing(value: &Value) -> Value {
    match value {
        Value::Object(table) => {
            let named = table.iter().filter(|(_, value)| !value.is_null());
            named.map(|(name, value)| (name.clone(), without_nothing(value))).collect()
        }
        value => value.clone(),
    }
}
