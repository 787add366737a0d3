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

/// Names of what an assistant thought before its answer.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// A message as transformers gives it to templates (`_normalize_chat_messages` and `_alias_reasoning_fields` of 5.24): keys
/// without a value are not there, and reasoning has the two names that templates read.
pub(super) fn normalised(message: &Value) -> Value {
    if message.kind() != ValueKind::Map {
        return message.clone();
    }
    let mut keys: Vec<(Value, Value)> = message
        .try_iter()
        .into_iter()
        .flatten()
        .filter_map(|key| {
            let value = message.get_item(&key).ok().filter(|value| !value.is_none())?;
            Some((key, value))
        })
        .collect();
    if let Some(reasoning) = REASONING.iter().find_map(|key| get(message, key)) {
        let [first, second, _] = REASONING;
        if get(message, second).is_none() {
            keys.insert(0, (second.into(), reasoning.clone()));
        }
        if get(message, first).is_none() {
            keys.push((first.into(), reasoning));
        }
    }
    keys.into_iter().collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values: what templates see of `_alias_reasoning_fields(_normalize_chat_messages([message]))`.
    #[test]
    fn messages_are_those_that_transformers_gives_to_templates() {
        for (message, expected) in [
            (r#"{"role":"tool","content":null,"name":"f"}"#, r#"{"role":"tool","name":"f"}"#),
            (r#"{"role":"a","thinking":"t"}"#, r#"{"role":"a","thinking":"t","reasoning_content":"t"}"#),
            (r#"{"reasoning_content":"r","role":"a"}"#, r#"{"thinking":"r","reasoning_content":"r","role":"a"}"#),
            (
                r#"{"reasoning_content":null,"reasoning":"r"}"#,
                r#"{"thinking":"r","reasoning":"r","reasoning_content":"r"}"#,
            ),
            (r#"{"thinking":"t","reasoning_content":"r"}"#, r#"{"thinking":"t","reasoning_content":"r"}"#),
        ] {
            let message: Value = serde_json::from_str(message).unwrap();
            assert_eq!(serde_json::to_string(&normalised(&message)).unwrap(), expected);
        }
    }
}
