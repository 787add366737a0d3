//! Questions, and the files that they are in.

use std::fmt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::EvalError;
use crate::data::chat::rows;
use crate::data::{JSON_LINES, ending, read_text};

/// What is asked of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Question {
    /// Which of several continuations of a text is likeliest.
    MultipleChoice {
        /// The text.
        context: String,
        /// Its continuations, with the space that they may begin with.
        continuations: Vec<String>,
        /// Indices of the right ones.
        answers: Vec<usize>,
    },
    /// How likely a continuation is, and whether it is the likeliest token by token.
    LogLikelihood {
        /// The text.
        context: String,
        /// What follows it.
        continuation: String,
    },
    /// What the model writes.
    Generate {
        /// The text to continue.
        context: String,
        /// Right answers.
        targets: Vec<String>,
        /// Texts that end the answer and are not part of it.
        until: Vec<String>,
        /// Most tokens, if the row says so.
        max_new_tokens: Option<usize>,
    },
    /// How likely a whole text is.
    Document {
        /// The text.
        text: String,
    },
}

/// The kind of a question; those of a task are all of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// [`Question::MultipleChoice`].
    MultipleChoice,
    /// [`Question::LogLikelihood`].
    LogLikelihood,
    /// [`Question::Generate`].
    Generate,
    /// [`Question::Document`].
    Document,
}

/// The harness's words (`output_type`).
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(match self {
            Self::MultipleChoice => "multiple_choice",
            Self::LogLikelihood => "loglikelihood",
            Self::Generate => "generate_until",
            Self::Document => "loglikelihood_rolling",
        })
    }
}

impl Question {
    /// Its kind.
    pub fn kind(&self) -> Kind {
        match self {
            Self::MultipleChoice { .. } => Kind::MultipleChoice,
            Self::LogLikelihood { .. } => Kind::LogLikelihood,
            Self::Generate { .. } => Kind::Generate,
            Self::Document { .. } => Kind::Document,
        }
    }
}

/// The questions of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// Name of the file, without its ending.
    pub name: String,
    /// The file.
    pub path: PathBuf,
    /// What its questions are.
    pub kind: Kind,
    /// Line of the file, from 1, and question; at least one.
    pub questions: Vec<(u64, Question)>,
}

/// Reads the questions of a file, a JSON object per line (`.gz` and `.zst` are decompressed) or rows of a `.parquet` file, up
/// to `limit` of them.
///
/// | kind | keys |
/// |---|---|
/// | multiple choice | `context`, `continuations` (list of texts), `answer` (index from 0, a continuation, or a list of them) |
/// | log-likelihood | `context`, `continuation` |
/// | generation | `context`, `target` (text or list of texts), `until` (text or list of texts), `max_new_tokens` |
///
/// Fails if the file cannot be read, a row is not one of these or of another kind than the first; with line and key.
pub fn read_task(path: &Path, limit: usize) -> Result<Task, EvalError> {
    let mut questions: Vec<(u64, Question)> = Vec::new();
    for row in rows(path)?.take(limit) {
        let row = row?;
        let question = row.json().and_then(|json| question(&json)).map_err(|what| row.refused(what))?;
        if let Some((line, first)) = questions.first().filter(|(_, first)| first.kind() != question.kind()) {
            let (first, kind) = (first.kind(), question.kind());
            let what =
                format!("{kind}, but line {line} is {first}: the rows of a file are of one kind; make it two files");
            return Err(row.refused(what).into());
        }
        questions.push((row.line, question));
    }
    task(path, questions, "has no question")
}

/// Reads a text whose perplexity is wanted: a file is one document, and a row with the key `text` of a `.jsonl` or
/// `.json` file (also `.gz`, `.zst`) or of a `.parquet` file is one, up to `limit` of them. Fails if the file cannot be
/// read, a row has no text, or there is none.
pub fn read_documents(path: &Path, limit: usize) -> Result<Task, EvalError> {
    let kind = ending(path);
    let is_json = JSON_LINES.contains(&&*kind) || ["json", "gz", "zst", "parquet"].contains(&&*kind);
    let mut questions = Vec::new();
    if is_json {
        for row in rows(path)?.take(limit) {
            let row = row?;
            let text = row.json().and_then(|json| text(&json, "text")).map_err(|what| row.refused(what))?;
            questions.push((row.line, Question::Document { text }));
        }
    } else {
        let text = read_text(path);
        let text = text.map_err(|cause| EvalError::Read { path: path.into(), cause })?;
        questions.push((1, Question::Document { text }));
    }
    questions.retain(|(_, question)| !matches!(question, Question::Document { text } if text.is_empty()));
    task(path, questions, "has no text")
}

fn task(path: &Path, questions: Vec<(u64, Question)>, nothing: &'static str) -> Result<Task, EvalError> {
    let Some((_, first)) = questions.first() else {
        return Err(EvalError::Nothing { path: path.into(), what: nothing });
    };
    let file = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    let name = file.split_once('.').map_or(&*file, |(name, _)| name).to_string();
    Ok(Task { name, path: path.into(), kind: first.kind(), questions })
}

fn question(row: &Value) -> Result<Question, String> {
    let Some(object) = row.as_object() else { return Err(format!("a row is a JSON object, this is {}", kind(row))) };
    let has = |key: &str| object.get(key).is_some_and(|value| !value.is_null());
    let kinds = ["continuations", "continuation", "target"];
    let mut present = kinds.iter().filter(|key| has(key));
    match (present.next(), present.next()) {
        (Some(one), Some(other)) => Err(format!("`{one}` and `{other}`: a row has one of {}", kinds.join(", "))),
        (None, _) => {
            let keys: Vec<&str> = object.keys().map(String::as_str).collect();
            let keys = if keys.is_empty() { "no keys".into() } else { keys.join(", ") };
            Err(format!("none of {} among {keys}", kinds.join(", ")))
        }
        (Some(&"continuations"), None) => multiple_choice(row),
        (Some(&"continuation"), None) => {
            let [context, continuation] = [text(row, "context")?, text(row, "continuation")?];
            nonempty(&continuation, "continuation")?;
            Ok(Question::LogLikelihood { context, continuation })
        }
        _ => {
            let max_new_tokens = match &row["max_new_tokens"] {
                Value::Null => None,
                value => match value.as_u64() {
                    Some(count) if count > 0 => Some(count as usize),
                    _ => return Err(format!("max_new_tokens: {value} is not a number of tokens; nearest legal: 1")),
                },
            };
            let until = if has("until") { texts(row, "until")? } else { Vec::new() };
            let targets = texts(row, "target")?;
            if targets.is_empty() {
                return Err("target: an empty list has no right answer".into());
            }
            Ok(Question::Generate { context: text(row, "context")?, targets, until, max_new_tokens })
        }
    }
}

fn multiple_choice(row: &Value) -> Result<Question, String> {
    let continuations = texts(row, "continuations")?;
    if continuations.is_empty() {
        return Err("continuations: an empty list; there must be at least one".into());
    }
    for (index, continuation) in continuations.iter().enumerate() {
        nonempty(continuation, &format!("continuations[{index}]"))?;
    }
    let count = continuations.len();
    let one = |value: &Value| match value {
        Value::Number(number) => match number.as_u64() {
            Some(index) if index < count as u64 => Ok(index as usize),
            _ => Err(format!("answer: {number} is not the index of a continuation; legal: 0 to {}", count - 1)),
        },
        Value::String(text) => {
            let same = |other: &String| other == text || other.trim_start() == text;
            let found = continuations.iter().position(same);
            found.ok_or_else(|| format!("answer: `{text}` is none of the continuations"))
        }
        Value::Null => Err("answer: missing; the index of the right continuation, from 0".into()),
        other => Err(format!("answer: an index or a continuation, this is {}", kind(other))),
    };
    let answers = match &row["answer"] {
        Value::Array(list) if list.is_empty() => return Err("answer: an empty list has no right answer".into()),
        Value::Array(list) => list.iter().map(one).collect::<Result<_, _>>()?,
        value => vec![one(value)?],
    };
    Ok(Question::MultipleChoice { context: text(row, "context")?, continuations, answers })
}

fn nonempty(text: &str, key: &str) -> Result<(), String> {
    if text.trim().is_empty() { Err(format!("{key}: an empty text has no log-likelihood")) } else { Ok(()) }
}

fn text(row: &Value, key: &str) -> Result<String, String> {
    match &row[key] {
        Value::String(text) => Ok(text.clone()),
        Value::Null => Err(format!("{key}: missing")),
        other => Err(format!("{key}: a text, this is {}", kind(other))),
    }
}

/// A text or a list of texts.
fn texts(row: &Value, key: &str) -> Result<Vec<String>, String> {
    match &row[key] {
        Value::String(text) => Ok(vec![text.clone()]),
        Value::Array(list) => {
            let text = |(index, value): (usize, &Value)| {
                value
                    .as_str()
                    .map(String::from)
                    .ok_or_else(|| format!("{key}[{index}]: a text, this is {}", kind(value)))
            };
            list.iter().enumerate().map(text).collect()
        }
        other => Err(format!("{key}: a text or a list of texts, this is {}", kind(other))),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests;
