//! Values of JSON objects, with messages that name the key.

use minijinja::value::{Value, ValueKind};

/// The value of a key that is there and not null.
pub(super) fn get(object: &Value, key: &str) -> Option<Value> {
    object.get_attr(key).ok().filter(|value| !value.is_undefined() && !value.is_none())
}

pub(super) fn kind(value: &Value) -> String {
    match value.kind() {
        ValueKind::Map => "an object".into(),
        ValueKind::Seq => "a list".into(),
        ValueKind::None | ValueKind::Undefined => "null".into(),
        ValueKind::Bool => "a boolean".into(),
        other => format!("a {other}"),
    }
}

/// A list under a key.
pub(super) fn list(row: &Value, key: &str) -> Result<Vec<Value>, String> {
    match get(row, key) {
        Some(list) if list.kind() == ValueKind::Seq => Ok(list.try_iter().into_iter().flatten().collect()),
        Some(other) => Err(format!("{key}: a list of messages, this is {}", kind(&other))),
        None => Err(format!("{key}: missing")),
    }
}

/// A text under a key.
pub(super) fn text(row: &Value, key: &str) -> Result<String, String> {
    match get(row, key) {
        Some(text) => text.as_str().map(String::from).ok_or_else(|| format!("{key}: a text, this is {}", kind(&text))),
        None => Err(format!("{key}: missing")),
    }
}

pub(super) fn message(role: &str, content: &str) -> Value {
    Value::from_iter([("role", Value::from(role)), ("content", Value::from(content))])
}
