//! The entries of a file or a command line, before they are matched with keys.

use std::path::Path;

use toml::de::DeTable;

use super::problem::{Origin, Problem};
use crate::refusal::{Access, advice};

/// A value as it was written.
#[derive(Clone, Debug)]
pub(super) enum Written {
    /// In a TOML file.
    Toml(toml::Value),
    /// On a command line.
    Text(String),
}

impl Written {
    /// Whether it is this word.
    pub fn is(&self, word: &str) -> bool {
        match self {
            Self::Toml(value) => value.as_str() == Some(word),
            Self::Text(text) => text == word,
        }
    }

    /// What to add to a refusal: a whole number that 63 bits do not hold has its own reason.
    pub fn limit(&self) -> &'static str {
        match self {
            Self::Text(text) if is_large(text) => LIMIT,
            _ => "",
        }
    }

    /// Whether it is a table without keys.
    pub fn is_empty_table(&self) -> bool {
        matches!(self, Self::Toml(toml::Value::Table(table)) if table.is_empty())
    }
}

/// Shown in messages as it was written.
impl std::fmt::Display for Written {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Toml(value) => value.fmt(f),
            Self::Text(text) => text.fmt(f),
        }
    }
}

/// A key and its value.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    /// Section and name as written.
    pub path: String,
    /// The value.
    pub value: Written,
    /// Where it was written.
    pub origin: Origin,
}

/// The largest whole number of a file or a command line: TOML's.
const LIMIT: &str = "; the largest is 9223372036854775807";

/// Whether it is a whole number above [`LIMIT`].
fn is_large(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<i64>().is_err()
}

/// The name and the text of a file; without one, those of a run of defaults. Fails if it cannot be read.
pub(super) fn read_text(file: Option<&Path>) -> Result<(String, String), Problem> {
    let Some(path) = file else { return Ok(("train.toml".into(), String::new())) };
    let name = path.display().to_string();
    let refused = |error| Problem::new(format!("{name}: {error}{}", advice(Access::Read, &error)));
    let text = std::fs::read_to_string(path).map_err(refused)?;
    Ok((name, text))
}

/// What is wrong with a value that is a word, which a parser takes for the beginning of a number or of `true`.
fn unquoted(written: &str) -> Option<String> {
    let value = written.split_once('=')?.1.split('#').next()?.trim();
    let is_legal = ["true", "false", "inf", "nan"].contains(&value);
    let is_word = value.starts_with(char::is_alphabetic) && !value.contains(['"', '\'']) && !is_legal;
    is_word.then(|| match value.to_lowercase().as_str() {
        word @ ("true" | "false") => format!("write {word}"),
        _ => format!("a text has quotes, write \"{value}\""),
    })
}

/// The entries of a TOML file called `name`; a key that stands in no section has a path without a dot. Fails if the
/// text is no TOML.
pub(super) fn read_file(name: &str, text: &str) -> Result<Vec<Entry>, Problem> {
    let line = |byte: usize| text[..byte].matches('\n').count();
    let origin = |byte: usize| Origin::File { name: name.into(), line: line(byte) + 1 };
    let syntax = |error: toml::de::Error| {
        let start = error.span().map_or(0, |span| span.start);
        let written = text.lines().nth(line(start)).unwrap_or_default().trim();
        let number = error.span().and_then(|span| text.get(span)).filter(|number| is_large(number));
        let what = match number {
            Some(number) => format!("{number} is too large a number{LIMIT}: `{written}`"),
            None => format!("{}: `{written}`", unquoted(written).unwrap_or_else(|| error.message().into())),
        };
        Problem { origin: origin(start), what }
    };
    let mut values: toml::Table = text.parse().map_err(syntax)?;
    let spans = DeTable::parse(text).map_err(syntax)?;
    let mut entries = Vec::new();
    for (section, content) in spans.get_ref() {
        let name = section.get_ref().as_ref();
        match (values.remove(name), content.get_ref().as_table()) {
            // An empty section has no keys to be known by; it stands for itself.
            (Some(toml::Value::Table(mut values)), Some(keys)) if !keys.is_empty() => {
                for key in keys.keys() {
                    let value = values.remove(key.get_ref().as_ref()).expect("both are the same text");
                    let path = format!("{name}.{}", key.get_ref());
                    entries.push(Entry { path, value: Written::Toml(value), origin: origin(key.span().start) });
                }
            }
            (value, _) => {
                let value = Written::Toml(value.expect("both are the same text"));
                entries.push(Entry { path: name.into(), value, origin: origin(section.span().start) });
            }
        }
    }
    // In the order of the file, which a table need not keep.
    entries.sort_by_key(|entry| match entry.origin {
        Origin::File { line, .. } => line,
        _ => 0,
    });
    Ok(entries)
}

/// The entries of `--section.key value` pairs.
pub(super) fn read_overrides(overrides: &[(String, String)]) -> Vec<Entry> {
    let entry = |(path, text): &(String, String)| Entry {
        path: path.clone(),
        value: Written::Text(text.clone()),
        origin: Origin::CommandLine,
    };
    overrides.iter().map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_know_their_lines() {
        let text = "loose = 1\n[training]\nsteps = 3\n\n[lr.form.wsd]\ntail = 5\n";
        let entries = read_file("run.toml", text).unwrap();
        let seen: Vec<String> = entries.iter().map(|e| format!("{}{} = {}", e.origin, e.path, e.value)).collect();
        assert_eq!(
            seen,
            ["run.toml:1: loose = 1", "run.toml:3: training.steps = 3", "run.toml:5: lr.form = { wsd = { tail = 5 } }"]
        );
    }

    #[test]
    fn broken_toml_is_named_with_its_line() {
        let problem = read_file("run.toml", "[training]\nsteps = \n").unwrap_err();
        assert!(problem.to_string().starts_with("run.toml:2: "), "{problem}");
        let twice = read_file("run.toml", "[lr]\nmax = 1\n  max = 2\n").unwrap_err().to_string();
        assert_eq!(twice, "run.toml:3: duplicate key: `max = 2`");
    }
}
