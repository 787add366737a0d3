//! What is known of a key of a run's configuration.

use serde_json::Value;

use super::kind::{Kind, NONE};

/// A key.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Section and name.
    pub path: &'static str,
    /// The values that it takes.
    pub kind: Kind,
    /// The default as TOML; empty where it follows from other keys, as the meaning says.
    pub default: &'static str,
    /// Its meaning.
    pub doc: &'static str,
    /// Whether `none` is a value.
    pub optional: bool,
    /// Other names in the same section, most of them Megatron's.
    pub aliases: &'static [&'static str],
}

impl Key {
    /// Name of the section.
    pub fn section(&self) -> &'static str {
        self.path.split('.').next().unwrap_or_default()
    }

    /// Name in the section.
    pub fn name(&self) -> &'static str {
        self.path.split_once('.').map_or(self.path, |(_, name)| name)
    }

    /// The legal values in words.
    pub fn legal(&self) -> String {
        self.kind.legal() + if self.optional { ", or none" } else { "" }
    }

    /// Whether the key only decides other keys, so that a resolved configuration does not have it.
    pub fn is_resolved_away(&self) -> bool {
        ["model.preset", "training.samples", "training.tokens"].contains(&self.path)
    }

    /// The default, of a key that has one. Panics if it follows from other keys.
    pub(super) fn default_value(&self) -> Value {
        let table: toml::Table = format!("value = {}", self.default).parse().expect("defaults are TOML");
        let none = self.optional && table["value"].as_str() == Some(NONE);
        if none { Value::Null } else { self.kind.accept(&table["value"]).expect("defaults are legal") }
    }

    pub(super) const fn optional(mut self) -> Self {
        self.optional = true;
        self
    }

    pub(super) const fn or(mut self, aliases: &'static [&'static str]) -> Self {
        self.aliases = aliases;
        self
    }
}

pub(super) const fn key(path: &'static str, kind: Kind, default: &'static str, doc: &'static str) -> Key {
    Key { path, kind, default, doc, optional: false, aliases: &[] }
}
