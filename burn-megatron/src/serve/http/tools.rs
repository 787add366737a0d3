//! Functions that a model may call, or must: its template writes them into the prompt, and calls are read from its answer.

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Deserializer, Value, json};

use super::error::ApiError;
use super::params::Params;

/// What begins a call in answers of Hermes, Qwen and models that are trained with their templates.
const BEGIN: &str = "<tool_call>";
const END: &str = "</tool_call>";

/// The tools of a request.
#[derive(Debug, Default)]
pub(super) struct Tools {
    /// Of the functions; with the choice `none` there are none.
    pub names: Vec<String>,
    /// Only the first call of an answer is given.
    one: bool,
    /// The schema of the answer, where it must be a call.
    pub schema: Option<Value>,
}

impl Tools {
    /// Takes `tools`, `tool_choice` and `parallel_tool_calls`.
    pub fn take(params: &mut Params) -> Result<Self, ApiError> {
        let all = match params.take("tools") {
            None => Vec::new(),
            Some(Value::Array(all)) => all,
            Some(other) => {
                return Err(ApiError::param("tools", format!("a list of functions is needed, this is {other}")));
            }
        };
        let choice = params.take("tool_choice").unwrap_or_else(|| "auto".into());
        let name = |tool: &Value| tool["function"]["name"].as_str().map(String::from);
        let names = all.iter().map(name).collect::<Option<Vec<_>>>();
        let names = names.ok_or_else(|| ApiError::param("tools", "a tool needs a `function` with a `name`"))?;
        let one = params.flag("parallel_tool_calls")? == Some(false);
        let wrong = |what: String| Err(ApiError::param("tool_choice", what));
        let schema = match (choice.as_str(), choice["function"]["name"].as_str()) {
            (Some("auto"), _) => None,
            (Some("none"), _) => return Ok(Self { one, ..Self::default() }),
            (Some("required"), _) if all.is_empty() => return wrong("\"required\" needs tools".into()),
            (Some("required"), _) => Some(calls(&all)),
            (None, Some(named)) => match names.iter().position(|name| name == named) {
                Some(at) => Some(calls(&all[at..=at])),
                None => return wrong(format!("no tool has the name {named}; legal: {}", names.join(", "))),
            },
            _ => {
                let legal = "auto, none, required, or an object with the name of a `function`";
                return wrong(format!("{choice} is not supported; legal: {legal}"));
            }
        };
        Ok(Self { names, one, schema })
    }

    /// What finds calls in one answer, if there can be any.
    pub fn reader(&self) -> Option<CallReader> {
        let of = || CallReader { names: self.names.clone(), one: self.one, held: String::new(), is_begun: false };
        (!self.names.is_empty()).then(of)
    }
}

/// The schema of a call of one of some functions, in both forms that are read as one.
fn calls(tools: &[Value]) -> Value {
    let mut all = Vec::new();
    for tool in tools {
        let function = &tool["function"];
        for key in ["arguments", "parameters"] {
            let mut arguments = match &function["parameters"] {
                Value::Null => json!({"type": "object", "additionalProperties": false}),
                given => given.clone(),
            };
            within(&mut arguments, &format!("#/anyOf/{}/properties/{key}", all.len()));
            let properties = json!({"name": {"const": function["name"]}, key: arguments});
            let required = json!(["name", key]);
            all.push(json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false}));
        }
    }
    json!({ "anyOf": all })
}

/// Changes the references of a schema to those of the same schema at a place in another.
fn within(schema: &mut Value, place: &str) {
    match schema {
        Value::Array(parts) => parts.iter_mut().for_each(|part| within(part, place)),
        Value::Object(keys) => {
            for (key, value) in keys {
                match value {
                    Value::String(name) if key == "$ref" && name.starts_with('#') => name.replace_range(..1, place),
                    value => within(value, place),
                }
            }
        }
        _ => {}
    }
}

/// A call of a function, as the model has written it.
#[derive(Debug, Deserialize)]
pub(super) struct Call {
    name: String,
    #[serde(alias = "parameters")]
    arguments: Box<RawValue>,
}

impl Call {
    /// In OpenAI's form; a part of an answer has its number too.
    pub fn json(&self, at: usize, id: &str, is_part: bool) -> Value {
        let written = self.arguments.get();
        // They may be a text already.
        let arguments: String = serde_json::from_str(written).unwrap_or_else(|_| written.into());
        let mut call = json!({"id": id, "type": "function", "function": {"name": self.name, "arguments": arguments}});
        if is_part {
            call["index"] = json!(at);
        }
        call
    }

    /// The call at the beginning of `<tool_call>`'s contents, and the text behind it.
    fn first(text: &str) -> Option<(Self, &str)> {
        let mut calls = Deserializer::from_str(text).into_iter();
        let call = calls.next()?.ok()?;
        let rest = &text[calls.byte_offset()..];
        let after = rest.trim_start();
        match after.strip_prefix(END) {
            Some(rest) => Some((call, rest)),
            // The end may be what has stopped the answer.
            None if after.is_empty() || after.starts_with(BEGIN) => Some((call, after)),
            None => None,
        }
    }
}

/// Reads an answer as it comes: gives what is no call, and at the end the calls.
///
/// A call is `<tool_call>{"name": .., "arguments": {..}}</tool_call>`, or the whole answer is `{"name": .., "parameters": {..}}`
/// of a function that there is, as Llama 3.1 writes it.
#[derive(Debug)]
pub(super) struct CallReader {
    names: Vec<String>,
    one: bool,
    held: String,
    /// Something was given.
    is_begun: bool,
}

impl CallReader {
    /// Takes more of the answer, and gives what can be shown of it.
    pub fn push(&mut self, text: &str) -> String {
        self.held += text;
        let may_be_call = !self.is_begun && self.held.trim_start().starts_with('{');
        let is_open = |at: &usize| self.held[*at..].starts_with(BEGIN) || BEGIN.starts_with(&self.held[*at..]);
        let starts = self.held.char_indices().map(|(at, _)| at);
        let end = if may_be_call { 0 } else { starts.clone().find(is_open).unwrap_or(self.held.len()) };
        let rest = self.held.split_off(end);
        let shown = std::mem::replace(&mut self.held, rest);
        self.is_begun |= !shown.trim().is_empty();
        shown
    }

    /// What is left, when the answer has ended: text that was none of a call, and the calls.
    pub fn end(&mut self) -> (String, Vec<Call>) {
        let held = std::mem::take(&mut self.held);
        let whole = serde_json::from_str(&held).ok();
        if let Some(call) = whole.filter(|call: &Call| self.names.contains(&call.name)) {
            return (String::new(), vec![call]);
        }
        let (mut text, mut calls, mut rest) = (String::new(), Vec::new(), held.as_str());
        while let Some((before, block)) = rest.split_once(BEGIN) {
            text += before;
            match Call::first(block) {
                Some((call, after)) => {
                    calls.push(call);
                    rest = after;
                }
                // One that is cut off or no JSON is what the model has said.
                None => {
                    text += BEGIN;
                    rest = block;
                }
            }
        }
        text += rest;
        calls.truncate(if self.one { 1 } else { usize::MAX });
        // Between calls are line breaks.
        (if text.trim().is_empty() && !calls.is_empty() { String::new() } else { text }, calls)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is shown of an answer that comes letter by letter, and its calls.
    fn read(answer: &str) -> (String, Vec<(String, String)>) {
        read_by(answer, false)
    }

    fn read_by(answer: &str, one: bool) -> (String, Vec<(String, String)>) {
        let tools = Tools { names: vec!["add".into()], one, schema: None };
        let mut reader = tools.reader().unwrap();
        let mut shown: String = answer.chars().map(|letter| reader.push(&letter.to_string())).collect();
        let (rest, calls) = reader.end();
        shown += &rest;
        let of = |call: &Call| {
            let json = call.json(0, "id", false);
            ["name", "arguments"].map(|key| json["function"][key].as_str().unwrap().to_string()).into()
        };
        (shown, calls.iter().map(of).collect())
    }

    #[test]
    fn calls_are_found_and_texts_are_shown() {
        let add = |arguments: &str| ("add".to_string(), arguments.to_string());
        let two = "Sums:\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"b\": 1, \"a\": 2}}\n</tool_call>\n<tool_call>{\"name\": \"add\", \
                   \"arguments\": {}}</tool_call>";
        assert_eq!(read(two), ("Sums:\n".into(), vec![add("{\"b\": 1, \"a\": 2}"), add("{}")]));
        let llama = "{\"name\": \"add\", \"parameters\": {\"a\": [1, 2]}}";
        assert_eq!(read(llama), (String::new(), vec![add("{\"a\": [1, 2]}")]));
        assert_eq!(read_by(two, true), ("Sums:\n".into(), vec![add("{\"b\": 1, \"a\": 2}")]));
        // What is said between calls and behind them; the tag in a text; one that is no call; one without an end.
        let mixed = "<tool_call>{\"name\": \"add\", \"arguments\": \"</tool_call>\"}</tool_call> then <tool_call>{}</tool_call> and \
                     <tool_call>{\"name\": \"add\", \"arguments\": 2} x";
        assert_eq!(read(mixed), (mixed[mixed.find(" then").unwrap()..].into(), vec![add("</tool_call>")]));
        let open = "<tool_call>{\"name\": \"add\", \"arguments\": 2}\n";
        assert_eq!(read(&[open, open, "Done."].concat()), ([open, "Done."].concat(), vec![add("2")]));
        assert_eq!(read(&["{} ", open].concat()), ("{} ".into(), vec![add("2")]));
        for text in [
            "1 < 2 <tool",
            "{\"name\": \"sub\", \"parameters\": {}}",
            "<tool_call>{\"name\"",
            "<tool_call>x</tool_call>",
        ] {
            assert_eq!(read(text), (text.into(), vec![]));
        }
    }
}
