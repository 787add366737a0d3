//! ShareGPT's form: `conversations` of `from` and `value`.

use minijinja::value::Value;

use super::values::{get, kind, list, message, text};

/// Speakers and their roles.
const SPEAKERS: [(&str, &str); 12] = [
    ("human", "user"),
    ("user", "user"),
    ("gpt", "assistant"),
    ("chatgpt", "assistant"),
    ("bing", "assistant"),
    ("bard", "assistant"),
    ("assistant", "assistant"),
    ("system", "system"),
    ("tool", "tool"),
    ("observation", "tool"),
    ("function_response", "tool"),
    ("function_call", "assistant"),
];

/// The messages of a row with `conversations`, which may also have them with `role` and `content`.
pub(super) fn messages(row: &Value) -> Result<Vec<Value>, String> {
    let mut messages = Vec::new();
    if let Some(system) = get(row, "system").filter(|system| system.as_str() != Some("")) {
        let Some(system) = system.as_str() else { return Err(format!("system: a text, this is {}", kind(&system))) };
        messages.push(message("system", system));
    }
    for (index, turn) in list(row, "conversations")?.into_iter().enumerate() {
        let at = |what: String| format!("conversations[{index}].{what}");
        if get(&turn, "from").is_none() && get(&turn, "role").is_some() {
            messages.push(turn);
            continue;
        }
        let from = text(&turn, "from").map_err(at)?;
        let Some((_, role)) = SPEAKERS.iter().find(|(speaker, _)| *speaker == from) else {
            let known: Vec<&str> = SPEAKERS.iter().map(|(speaker, _)| *speaker).collect();
            return Err(at(format!("from: unknown speaker `{from}`; known: {}", known.join(", "))));
        };
        let value = text(&turn, "value").map_err(at)?;
        messages.push(match from.as_str() {
            "function_call" => {
                let function: Value = serde_json::from_str(&value)
                    .map_err(|error| at(format!("value: a call that is not JSON: {error}")))?;
                let call = Value::from_iter([("type", Value::from("function")), ("function", function)]);
                let calls = Value::from(vec![call]);
                Value::from_iter([("role", (*role).into()), ("content", Value::from("")), ("tool_calls", calls)])
            }
            _ => match get(&turn, "weight") {
                None => message(role, &value),
                Some(weight) => {
                    Value::from_iter([("role", (*role).into()), ("content", Value::from(value)), ("weight", weight)])
                }
            },
        });
    }
    Ok(messages)
}

#[cfg(test)]
mod tests {
    use super::super::row::parse_row;
    use super::*;

    #[test]
    fn calls_become_tool_calls() {
        let row = r#"{"conversations":[{"from":"human","value":"2+2"},
            {"from":"function_call","value":"{\"name\":\"add\",\"arguments\":{\"a\":2}}"},
            {"from":"observation","value":"4"},{"from":"gpt","value":"It is 4.","weight":1}],"tools":"[]","system":"S"}"#;
        let row = parse_row(row.as_bytes()).unwrap();
        let roles: Vec<String> = row.messages.iter().map(|message| text(message, "role").unwrap()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool", "assistant"]);
        let name = get(&row.messages[2], "tool_calls").unwrap().get_item_by_index(0).unwrap();
        assert_eq!(text(&get(&name, "function").unwrap(), "name").unwrap(), "add");
        assert!(row.tools.is_none());
        assert!(get(&row.messages[4], "weight").is_some() && get(&row.messages[1], "weight").is_none());
    }
}
