//! Conversations that a model is to continue, as clients of OpenAI's interface have them.

use minijinja::value::{Value, ValueKind};
use serde_json::{Map, Value as Json};

use super::row::{Conversation, check_message, tools, variables};
use super::values::{get, kind, list, normalised, text};

/// Variables of a template that a request has in other keys.
const OWN: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];

/// One of Unicode's noncharacters, which no text has, and a space that is gone where a template trims.
const END: char = '\u{fdd2}';

/// A request for a model's next message, of which nothing was checked.
#[derive(Clone, Debug)]
pub struct PromptBody(Value);

impl PromptBody {
    /// Reads a JSON object; its keys but `messages` and `chat_template_kwargs` are given too.
    ///
    /// # Errors
    /// If it is none.
    pub fn read(json: &[u8]) -> Result<(Self, Map<String, Json>), String> {
        let body: Value = serde_json::from_slice(json).map_err(|error| format!("not JSON: {error}"))?;
        if body.kind() != ValueKind::Map {
            return Err(format!("{}, not a JSON object", kind(&body)));
        }
        let is_other = |key: &str| !["messages", "chat_template_kwargs"].contains(&key);
        let others = entries(&body).into_iter().filter(|(key, _)| key.as_str().is_some_and(is_other));
        let json = |(key, value): (Value, Value)| Ok((key.to_string(), serde_json::to_value(value)?));
        let others = others.map(json).collect::<serde_json::Result<_>>().map_err(|error| error.to_string())?;
        Ok((Self(body), others))
    }

    /// What [`parse_prompt`] makes of it.
    ///
    /// # Errors
    /// As that.
    pub fn conversation(&self) -> Result<Conversation, String> {
        let Self(row) = self;
        let mut messages = Vec::new();
        for (index, message) in list(row, "messages")?.into_iter().enumerate() {
            let message = if message.kind() == ValueKind::Map { taken(index, &message)? } else { message };
            check_message(index, &message)?;
            messages.push(message);
        }
        if messages.is_empty() {
            return Err("messages: a list of at least one message is needed".into());
        }
        let (prompt, tools, variables) = (messages.len(), tools(row)?, variables(row)?);
        if let Some((name, _)) = variables.iter().find(|(name, _)| OWN.contains(&name.as_str())) {
            return Err(format!("chat_template_kwargs: `{name}` is what the request's own keys say; leave it out"));
        }
        Ok(Conversation { messages, prompt, tools, add_generation_prompt: true, variables })
    }
}

/// Reads `messages` of a JSON object, and perhaps `tools` and `chat_template_kwargs`; keys keep their order. Messages become what
/// templates take: contents of text parts are texts, arguments of calls that are JSON in a text, or an empty one, are objects, and
/// keys without a value are left out.
///
/// # Errors
/// The key and what is wrong with it.
pub fn parse_prompt(json: &[u8]) -> Result<Conversation, String> {
    PromptBody::read(json)?.0.conversation()
}

impl Conversation {
    /// The same without tools.
    pub fn without_tools(self) -> Self {
        Self { tools: None, ..self }
    }

    /// The same, of which the last message is to be continued.
    pub fn continued(self) -> Self {
        Self { add_generation_prompt: false, ..self }
    }

    /// What `render` writes of it up to the end of the last message's text.
    pub(super) fn up_to_its_end(&self, render: impl Fn(&Self) -> Result<String, String>) -> Result<String, String> {
        let (mut marked, at) = (self.clone(), self.messages.len().saturating_sub(1));
        let said = self.messages.last().and_then(|last| text(last, "content").ok());
        let Some(said) = said.filter(|said| !said.trim().is_empty()) else {
            return Err(format!(
                "messages[{at}].content: there is no text to continue; give it one, or ask for the next message"
            ));
        };
        let with_end = |(key, value): (Value, Value)| match key.as_str() {
            Some("content") => (key, Value::from(format!("{said}{END} "))),
            _ => (key, value),
        };
        marked.messages[at] = entries(&self.messages[at]).into_iter().map(with_end).collect();
        let rendered = render(&marked)?;
        let mut parts = rendered.split(END);
        let (Some(before), Some(after), None) = (parts.next(), parts.next(), parts.next()) else {
            return Err(format!(
                "messages[{at}]: the chat template does not write this message once, so it cannot be continued"
            ));
        };
        // Where the template trims texts, it trims this one.
        let before = if after.starts_with(' ') { before } else { before.trim_end() };
        match before.trim_end().ends_with(said.trim()) {
            true => Ok(before.into()),
            false => Err(format!("messages[{at}]: the chat template changes this message, so it cannot be continued")),
        }
    }
}

fn taken(index: usize, message: &Value) -> Result<Value, String> {
    let is_nothing = |value: &Value| value.is_none() || value.kind() == ValueKind::Seq && value.len() == Some(0);
    let mut keys = Vec::new();
    for (key, value) in entries(message).into_iter().filter(|(_, value)| !is_nothing(value)) {
        let value = match key.as_str() {
            Some("content") if value.kind() == ValueKind::Seq => text_of_parts(index, &value)?,
            Some("tool_calls") if value.kind() == ValueKind::Seq => {
                items(&value).map(|call| with_objects(&call)).collect()
            }
            _ => value,
        };
        keys.push((key, value));
    }
    Ok(normalised(&keys.into_iter().collect()))
}

fn text_of_parts(index: usize, parts: &Value) -> Result<Value, String> {
    let text = |part: Value| {
        let is_text = get(&part, "type").is_some_and(|kind| kind.as_str() == Some("text"));
        get(&part, "text").filter(|_| is_text).and_then(|text| text.as_str().map(String::from))
    };
    let all: Option<String> = items(parts).map(text).collect();
    all.map(Value::from).ok_or_else(|| format!("messages[{index}]: only parts of the type `text` are supported"))
}

/// A call whose arguments are an object, if they are one in a text.
fn with_objects(call: &Value) -> Value {
    // Clients have an empty text where a function has no arguments.
    let read = |arguments: &Value| {
        let text = arguments.as_str()?;
        serde_json::from_str(if text.trim().is_empty() { "{}" } else { text }).ok()
    };
    let function = |function: &Value| -> Value {
        let of = |(key, value): (Value, Value)| match key.as_str() {
            Some("arguments") => (key, read(&value).unwrap_or(value)),
            _ => (key, value),
        };
        entries(function).into_iter().map(of).collect()
    };
    let of = |(key, value): (Value, Value)| match key.as_str() {
        Some("function") if value.kind() == ValueKind::Map => (key, function(&value)),
        _ => (key, value),
    };
    entries(call).into_iter().map(of).collect()
}

fn items(list: &Value) -> impl Iterator<Item = Value> {
    list.try_iter().into_iter().flatten()
}

fn entries(object: &Value) -> Vec<(Value, Value)> {
    items(object).map(|key| (key.clone(), object.get_item(&key).unwrap_or_default())).collect()
}
