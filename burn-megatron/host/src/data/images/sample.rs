//! Samples of images, and what can be wrong with one.

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::decode::HEAD;
use super::error::ImageError;

/// What a sample says of its image.
#[derive(Clone, Debug, PartialEq)]
pub enum Target {
    /// Its class.
    Label(usize),
    /// A text.
    Text(String),
    /// A conversation: a list of objects with `role` and `content`, as chat templates take it.
    Messages(Value),
}

/// A sample that is there.
#[derive(Debug)]
pub(super) struct Entry {
    /// File and line, or file and member.
    pub place: String,
    pub image: Location,
    pub target: Target,
}

/// Where the bytes of an image are.
#[derive(Debug)]
pub(super) enum Location {
    /// In a file of their own.
    File(PathBuf),
    /// In the shard.
    Within(Range<u64>),
}

/// What a list holds: samples, and why others cannot be used.
#[derive(Default)]
pub(super) struct Found {
    pub entries: Vec<Entry>,
    pub unusable: Vec<String>,
}

pub(super) fn unreadable(path: &Path) -> impl FnOnce(std::io::Error) -> ImageError {
    move |source| ImageError::Read { path: path.into(), source }
}

/// The first bytes of a file.
pub(super) fn head(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(HEAD as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// What is wrong with a JSON line that has no target.
pub(super) const NO_TARGET: &str = "has none of `label`, `text` and `messages`; legal: one of them";

/// The target of a JSON line, if it has one.
pub(super) fn target(object: &Value) -> Result<Option<Target>, String> {
    let present = |key: &str| object.get(key).filter(|value| !value.is_null());
    let target = match (present("label"), present("text"), present("messages")) {
        (None, None, None) => return Ok(None),
        (Some(label), None, None) => match label.as_u64() {
            Some(label) => Target::Label(label as usize),
            None => return Err(format!("`label` is {label}; legal: the number of a class, from 0")),
        },
        (None, Some(text), None) => match text.as_str() {
            Some(text) => Target::Text(text.into()),
            None => return Err(format!("`text` is {text}; legal: a string")),
        },
        (None, None, Some(messages)) if messages.is_array() => Target::Messages(messages.clone()),
        (None, None, Some(messages)) => return Err(format!("`messages` is {messages}; legal: a list of messages")),
        _ => return Err("has more than one of `label`, `text` and `messages`; legal: one of them".into()),
    };
    Ok(Some(target))
}
