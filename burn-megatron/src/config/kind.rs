//! The kinds of values.

use std::collections::BTreeMap;

use serde_json::Value;

use super::layer::Written;
use super::problem::did_you_mean;
use crate::data::SplitRatios;
use crate::engine::CommWord;
use crate::lr::{LrDecay, Span};
use models::recompute::Module;

/// The kind of a key's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A whole number of at least 1.
    Count,
    /// A whole number of at least 1, or `auto`.
    Automatic,
    /// A whole number of at least 0.
    Whole,
    /// A whole number from 0 to this.
    UpTo(u64),
    /// A finite number.
    Number,
    /// True or false.
    Flag,
    /// Any text.
    Text,
    /// A file or a folder.
    Path,
    /// Several files; one may stand alone.
    Paths,
    /// Several names; one may stand alone.
    Names,
    /// Several numbers.
    Numbers,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A length of training, a [`Span`].
    Length,
    /// Shares of training, validation and test, a [`SplitRatios`].
    Shares,
    /// The form of a learning-rate schedule, an [`LrDecay`].
    Form,
    /// Modules of a layer to recompute, [`Module`]s; one may stand alone.
    Modules,
    /// Communication of context-parallel attention, [`CommWord`]s; one may stand alone.
    CommTypes,
    /// Two whole numbers of at least 1.
    Pair,
    /// Factors of at least 0 by pattern of names.
    Scales,
    /// Whole numbers of at least 1 by pattern of names.
    Counts,
    /// Three whole numbers of at least 1.
    Triple,
}

/// The word for a number that follows from the run.
pub(super) const AUTO: &str = "auto";

/// The word for no value.
pub(super) const NONE: &str = "none";

impl Kind {
    /// The legal values in words.
    pub fn legal(self) -> String {
        match self {
            Self::Count => "a whole number of at least 1".into(),
            Self::Automatic => "a whole number of at least 1, or auto".into(),
            Self::Whole => "a whole number of at least 0".into(),
            Self::UpTo(most) => format!("a whole number from 0 to {most}"),
            Self::Number => "a finite number".into(),
            Self::Flag => "true or false".into(),
            Self::Text => "a string".into(),
            Self::Path => "a path in quotes".into(),
            Self::Paths => "a list of paths in quotes".into(),
            Self::Names => "a list of names in quotes".into(),
            Self::Numbers => "a list of numbers".into(),
            Self::Choice(words) => format!("one of {}", words.join(", ")),
            Self::Length => "a number of steps, \"100 steps\" or \"6400 samples\"".into(),
            Self::Shares => "shares of training, validation and test such as \"95,5,0\"".into(),
            Self::Form => "constant, linear, cosine, inverse-square-root, or { wsd = { tail = \"100 steps\", form = \
                           \"linear\" | \"cosine\" | \"exponential\" | \"minus-sqrt\" } }"
                .into(),
            Self::Modules => "a list of core-attention, mlp-activation and norms".into(),
            Self::CommTypes => "one of p2p, all_gather, a2a, a2a+p2p, or a list of them".into(),
            Self::Pair => "two whole numbers of at least 1 such as [4, 2]".into(),
            Self::Scales => "a table of patterns and factors of at least 0 such as { \"*.mlp.*\" = 0.5 }".into(),
            Self::Counts => "a table of patterns and whole numbers of at least 1 such as { \"*.mlp.*\" = 32 }".into(),
            Self::Triple => "three whole numbers of at least 1 such as [32, 32, 100000]".into(),
        }
    }

    /// The value as the configuration stores it, or `None` if it is of another kind.
    pub fn accept(self, value: &toml::Value) -> Option<Value> {
        let json = serde_json::to_value(value).ok()?;
        let fits = match self {
            Self::Count => json.as_u64().is_some_and(|n| n > 0),
            Self::Automatic => json == AUTO || json.as_u64().is_some_and(|n| n > 0),
            Self::Whole => json.is_u64(),
            Self::UpTo(most) => json.as_u64().is_some_and(|n| n <= most),
            Self::Number => return value_as_number(value).map(Value::from),
            Self::Flag => json.is_boolean(),
            Self::Text | Self::Path => json.as_str().is_some_and(|text| !text.is_empty()),
            Self::Paths | Self::Names => match value {
                toml::Value::Array(paths) => {
                    paths.iter().all(|path| path.as_str().is_some_and(|path| !path.is_empty()))
                }
                _ => return Self::Path.accept(value).map(|path| Value::Array(vec![path])),
            },
            Self::Numbers => {
                let numbers: Option<Vec<f64>> = value.as_array()?.iter().map(value_as_number).collect();
                return numbers.map(Value::from);
            }
            Self::Choice(words) => json.as_str().is_some_and(|word| words.contains(&word)),
            Self::Length => return normal::<Span>(json),
            Self::Shares => return normal::<SplitRatios>(json),
            Self::Form => return normal::<LrDecay>(json),
            Self::CommTypes if json.is_string() => return normal::<Vec<CommWord>>(Value::Array(vec![json])),
            Self::CommTypes => normal::<Vec<CommWord>>(json.clone()).is_some_and(|words| words != Value::Array(vec![])),
            Self::Pair => are_counts(&json, 2),
            Self::Triple => are_counts(&json, 3),
            Self::Scales => {
                let factor = |(pattern, factor): (&String, &toml::Value)| {
                    Some((pattern.clone(), value_as_number(factor).filter(|factor| *factor >= 0.0)?))
                };
                let factors: Option<BTreeMap<String, f64>> = value.as_table()?.iter().map(factor).collect();
                return serde_json::to_value(factors?).ok();
            }
            Self::Counts => {
                json.as_object().is_some_and(|table| table.values().all(|count| count.as_u64().is_some_and(|n| n > 0)))
            }
            Self::Modules if json.is_string() => return normal::<Vec<Module>>(Value::Array(vec![json])),
            Self::Modules => return normal::<Vec<Module>>(json),
        };
        fits.then_some(json)
    }

    /// The word that may be meant by another one, where a list of words is legal.
    pub(super) fn guess(self, written: &Written) -> String {
        let Self::Choice(words) = self else { return String::new() };
        did_you_mean(written.to_string().trim_matches('"'), words.iter().copied())
    }

    /// A value as it was written somewhere.
    pub(super) fn take(self, written: &Written) -> Option<Value> {
        match written {
            Written::Toml(value) => self.accept(value),
            Written::Text(text) => self.accept(&self.read(text)?),
        }
    }

    /// A value from a command line, where strings have no quotes and lists may be written with commas.
    pub fn read(self, text: &str) -> Option<toml::Value> {
        let written = |text: &str| -> Option<toml::Value> {
            let mut table: toml::Table = format!("value = {text}").parse().ok()?;
            table.remove("value")
        };
        let string = || Some(toml::Value::from(text));
        match self {
            Self::Count | Self::Whole | Self::UpTo(_) | Self::Number | Self::Flag | Self::Scales | Self::Counts => {
                written(text)
            }
            Self::Automatic if text == AUTO => string(),
            Self::Automatic => written(text),
            Self::Text | Self::Path | Self::Choice(_) | Self::Shares => string(),
            Self::Length => {
                if text.parse::<u64>().is_ok() {
                    written(text)
                } else {
                    string()
                }
            }
            Self::Form => {
                if text.starts_with('{') {
                    written(text)
                } else {
                    string()
                }
            }
            Self::Paths | Self::Names | Self::Numbers | Self::Modules | Self::CommTypes | Self::Pair | Self::Triple
                if text.starts_with('[') =>
            {
                written(text)
            }
            Self::Paths | Self::Names | Self::Modules | Self::CommTypes => {
                Some(text.split(',').map(|path| path.trim().to_string()).collect::<Vec<_>>().into())
            }
            Self::Numbers => written(&format!("[{text}]")),
            Self::Pair | Self::Triple => {
                let numbers: Vec<&str> = text.split([',', ' ']).filter(|number| !number.is_empty()).collect();
                written(&format!("[{}]", numbers.join(",")))
            }
        }
    }
}

/// Whether this is so many whole numbers of at least 1.
fn are_counts(json: &Value, count: usize) -> bool {
    let all = |list: &Vec<Value>| list.iter().all(|number| number.as_u64().is_some_and(|n| n > 0));
    json.as_array().is_some_and(|list| list.len() == count && all(list))
}

fn value_as_number(value: &toml::Value) -> Option<f64> {
    let number = match value {
        toml::Value::Integer(number) => *number as f64,
        toml::Value::Float(number) => *number,
        _ => return None,
    };
    number.is_finite().then_some(number)
}

/// The value as its type writes it.
fn normal<T: serde::Serialize + serde::de::DeserializeOwned>(json: Value) -> Option<Value> {
    serde_json::to_value(serde_json::from_value::<T>(json).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(kind: Kind, text: &str) -> Option<Value> {
        kind.accept(&kind.read(text)?)
    }

    #[test]
    fn command_line_values_become_what_a_file_would_hold() {
        assert_eq!(read(Kind::Count, "12"), Some(json!(12)));
        assert_eq!(
            (read(Kind::Automatic, "12"), read(Kind::Automatic, "auto")),
            (Some(json!(12)), Some(json!("auto")))
        );
        assert_eq!(read(Kind::Number, "3e-4"), Some(json!(3e-4)));
        assert_eq!(read(Kind::Number, "1"), Some(json!(1.0)));
        assert_eq!(read(Kind::Paths, "a, b"), Some(json!(["a", "b"])));
        assert_eq!(read(Kind::Paths, "[\"a, b\"]"), Some(json!(["a, b"])));
        assert_eq!(read(Kind::Numbers, "0.5,1"), Some(json!([0.5, 1.0])));
        assert_eq!(read(Kind::Length, "100"), Some(json!("100 steps")));
        assert_eq!(read(Kind::Length, "6400 samples"), Some(json!("6400 samples")));
        assert_eq!(read(Kind::Shares, "95, 5"), Some(json!("95,5,0")));
        assert_eq!(read(Kind::Modules, "core_attn, layernorm"), Some(json!(["core-attention", "norms"])));
        assert_eq!(read(Kind::CommTypes, "a2a+p2p"), Some(json!(["a2a+p2p"])));
        assert_eq!(read(Kind::CommTypes, "p2p, all_gather"), Some(json!(["p2p", "all_gather"])));
        assert_eq!(read(Kind::Pair, "4 2"), Some(json!([4, 2])));
        assert_eq!(read(Kind::Triple, "32 32 1000"), Some(json!([32, 32, 1000])));
        assert_eq!(read(Kind::Scales, "{ \"*.mlp.*\" = 2 }"), Some(json!({ "*.mlp.*": 2.0 })));
        assert_eq!(read(Kind::Counts, "{ q_proj = 2 }"), Some(json!({ "q_proj": 2 })));
        assert_eq!(Kind::Modules.accept(&toml::Value::from("norms")), Some(json!(["norms"])));
        let wsd = "{ wsd = { tail = 10, form = \"linear\" } }";
        assert_eq!(read(Kind::Form, wsd), Some(json!({ "wsd": { "tail": "10 steps", "form": "linear" } })));
    }

    #[test]
    fn other_kinds_are_refused() {
        for (kind, text) in [
            (Kind::Count, "0"),
            (Kind::Count, "1.5"),
            (Kind::Count, "\"4\""),
            (Kind::Automatic, "0"),
            (Kind::Automatic, "often"),
            (Kind::Whole, "-1"),
            (Kind::UpTo(3), "4"),
            (Kind::Number, "inf"),
            (Kind::Number, "fast"),
            (Kind::Flag, "yes"),
            (Kind::Choice(&["f32", "f64"]), "f16"),
            (Kind::Length, "10 epochs"),
            (Kind::Shares, "1,2,3,4"),
            (Kind::Form, "square"),
            (Kind::Path, ""),
            (Kind::Modules, "mlp"),
            (Kind::CommTypes, "ring"),
            (Kind::CommTypes, "[]"),
            (Kind::Pair, "4"),
            (Kind::Pair, "4,0"),
            (Kind::Triple, "4,2"),
            (Kind::Scales, "{ \"*\" = -1 }"),
            (Kind::Scales, "0.5"),
            (Kind::Counts, "{ \"*\" = 0 }"),
        ] {
            assert_eq!(read(kind, text), None, "{kind:?} {text}");
        }
        assert_eq!(Kind::Text.accept(&toml::Value::Integer(4)), None);
        assert_eq!(Kind::Paths.accept(&toml::Value::from("a")), Some(json!(["a"])));
    }
}
