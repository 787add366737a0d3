//! A resolved configuration as TOML, with the meaning of every key; read again it gives the same.

use std::fmt::Write;

use serde_json::Value;

use super::keys::{KEYS, SECTIONS};
use super::kind::NONE;
use super::model::{kebab, sizes};
use super::run::RunConfig;

/// Column of the comments.
const COMMENT: usize = 44;

impl RunConfig {
    /// The configuration as TOML.
    pub fn to_toml(&self) -> String {
        let values = serde_json::to_value(self).expect("plain data");
        let mut text = String::new();
        for (section, doc) in SECTIONS {
            let _ = write!(text, "{}# {doc}\n[{section}]\n", if text.is_empty() { "" } else { "\n" });
            for key in KEYS.iter().filter(|key| key.section() == section && key.path != "model.preset") {
                line(&mut text, key.name(), &values[section][key.name()], key.doc);
            }
            if section == "model" {
                for (name, value) in sizes(&self.model.config) {
                    line(&mut text, &kebab(&name), &value, "");
                }
            }
        }
        text
    }
}

fn line(text: &mut String, name: &str, value: &Value, doc: &str) {
    let value = match value {
        Value::Null => format!("\"{NONE}\""),
        value => toml::Value::try_from(value).map_or_else(|error| error.to_string(), |value| value.to_string()),
    };
    let assignment = format!("{name} = {value}");
    let _ = match doc.is_empty() {
        true => writeln!(text, "{assignment}"),
        false => writeln!(text, "{assignment:<COMMENT$} # {doc}"),
    };
}
