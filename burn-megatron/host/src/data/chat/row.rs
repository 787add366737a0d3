//! A row of chat data as a conversation, whatever form it has.

use minijinja::value::{Value, ValueKind};

use super::sharegpt;
use super::values::{get, kind, list, message, normalised, text};

/// Roles that chat templates know.
const ROLES: [&str; 7] = ["system", "developer", "user", "assistant", "tool", "function", "ipython"];

/// Keys that say which form a row has.
const FORMS: [&str; 6] = ["messages", "conversations", "prompt", "completion", "instruction", "output"];

/// One conversation with at least one assistant turn.
#[derive(Clone, Debug)]
pub struct Conversation {
    /// Objects with `role`, `content` and whatever else the template takes.
    pub(super) messages: Vec<Value>,
    /// The first messages that are a prompt, whose assistant turns are not learned.
    pub(super) prompt: usize,
    pub(super) tools: Option<Value>,
    /// Whether the text ends with the beginning of another assistant turn.
    pub(super) add_generation_prompt: bool,
    /// Further variables of the template.
    pub(super) variables: Vec<(String, Value)>,
}

/// Reads one JSON object.
///
/// | form | keys |
/// |---|---|
/// | messages | `messages`: objects with `role` and `content` (`tool_calls`, ...); `tools` |
/// | prompt and completion | `prompt`, `completion`: both text, or both lists of messages; only the completion is learned |
/// | Alpaca | `instruction`, `input`, `output`; `system`, `history` |
/// | ShareGPT | `conversations`: objects with `from` and `value`; `system`, `tools` |
///
/// Every form may have `chat_template_kwargs`, variables for the template, and `add_generation_prompt`.
///
/// # Errors
/// The key and what is wrong with it.
pub fn parse_row(json: &[u8]) -> Result<Conversation, String> {
    let row: Value = serde_json::from_slice(json).map_err(|error| format!("not JSON: {error}"))?;
    from_value(&row)
}

/// [`parse_row`] of what is parsed already.
pub(super) fn from_value(row: &Value) -> Result<Conversation, String> {
    if row.kind() != ValueKind::Map {
        return Err(format!("a row is a JSON object, this is {}", kind(row)));
    }
    let has = |key: &str| get(row, key).is_some();
    let (messages, prompt) = match () {
        _ if has("messages") => (list(row, "messages")?, 0),
        _ if has("conversations") => (sharegpt::messages(row)?, 0),
        _ if has("prompt") || has("completion") => prompt_and_completion(row)?,
        _ if has("instruction") || has("output") => (alpaca(row)?, 0),
        _ => {
            let keys: Vec<String> =
                row.try_iter().map(|keys| keys.map(|key| key.to_string()).collect()).unwrap_or_default();
            let alike = |key: &String| FORMS.map(|form| (strsim::jaro(key, form), key.clone(), form));
            let nearest = keys.iter().flat_map(alike).max_by(|a, b| a.0.total_cmp(&b.0));
            let nearest = nearest.filter(|(alike, ..)| *alike > 0.7);
            return Err(format!(
                "no key of a conversation among {}{}; there must be `messages`, `conversations`, `prompt` and `completion`, or \
                 `instruction` and `output`",
                if keys.is_empty() { "no keys".into() } else { keys.join(", ") },
                nearest.map(|(_, key, form)| format!("; is `{key}` meant to be `{form}`?")).unwrap_or_default()
            ));
        }
    };
    check(&messages, prompt)?;
    let messages = messages.iter().map(normalised).collect();
    let add_generation_prompt = match get(row, "add_generation_prompt") {
        None => false,
        Some(flag) if flag.kind() == ValueKind::Bool => flag.is_true(),
        Some(other) => return Err(format!("add_generation_prompt: true or false, this is {}", kind(&other))),
    };
    Ok(Conversation { messages, prompt, tools: tools(row)?, add_generation_prompt, variables: variables(row)? })
}

/// Further variables of the template.
pub(super) fn variables(row: &Value) -> Result<Vec<(String, Value)>, String> {
    match get(row, "chat_template_kwargs") {
        None => Ok(Vec::new()),
        Some(map) if map.kind() == ValueKind::Map => {
            let keys = map.try_iter().into_iter().flatten();
            Ok(keys.map(|key| (key.to_string(), map.get_item(&key).unwrap_or_default())).collect())
        }
        Some(other) => Err(format!("chat_template_kwargs: an object, this is {}", kind(&other))),
    }
}

/// A conversation of these messages, of which the first `prompt` are not learned. The error has the message and what is
/// wrong with it.
pub(super) fn conversation(messages: Vec<Value>, prompt: usize, tools: Option<Value>) -> Result<Conversation, String> {
    check(&messages, prompt)?;
    let messages = messages.iter().map(normalised).collect();
    Ok(Conversation { messages, prompt, tools, add_generation_prompt: false, variables: Vec::new() })
}

impl Conversation {
    /// This prompt with the answer of another conversation.
    pub(super) fn with_answer_of(&self, other: &Self) -> Self {
        let messages = [&self.messages[..self.prompt], &other.messages[other.prompt..]].concat();
        Self { messages, ..self.clone() }
    }
}

/// Several data sets keep tools as text, because their columns have one type each.
pub(super) fn tools(row: &Value) -> Result<Option<Value>, String> {
    let Some(tools) = get(row, "tools") else { return Ok(None) };
    let tools = match tools.as_str() {
        Some("") => return Ok(None),
        Some(text) => serde_json::from_str(text).map_err(|error| format!("tools: a text that is not JSON: {error}"))?,
        None => tools,
    };
    match tools.kind() {
        ValueKind::Seq if tools.len() == Some(0) => Ok(None),
        ValueKind::Seq => Ok(Some(tools)),
        _ => Err(format!("tools: a list of functions, this is {}", kind(&tools))),
    }
}

fn prompt_and_completion(row: &Value) -> Result<(Vec<Value>, usize), String> {
    let both = ["prompt", "completion"].map(|key| get(row, key).ok_or_else(|| format!("{key}: missing")));
    let [prompt, completion] = both;
    let (prompt, completion) = (prompt?, completion?);
    match (prompt.as_str(), completion.as_str()) {
        (Some(_), Some(answer)) if answer.trim().is_empty() => {
            Err("completion: empty, there is nothing to learn; remove the row".into())
        }
        (Some(question), Some(answer)) => Ok((vec![message("user", question), message("assistant", answer)], 1)),
        _ => {
            let mut messages = list(row, "prompt")?;
            let prompt = messages.len();
            messages.extend(list(row, "completion")?);
            if messages.len() == prompt {
                return Err("completion: empty, there is nothing to learn; remove the row".into());
            }
            Ok((messages, prompt))
        }
    }
}

/// Stanford Alpaca's columns, with LLaMA-Factory's `system` and `history` (pairs of question and answer).
fn alpaca(row: &Value) -> Result<Vec<Value>, String> {
    let mut messages = Vec::new();
    if let Some(system) = get(row, "system").filter(|system| system.as_str() != Some("")) {
        messages.push(message("system", &text(row, "system").map_err(|_| format!("system: {}", kind(&system)))?));
    }
    if get(row, "history").is_some() {
        for (index, pair) in list(row, "history")?.iter().enumerate() {
            let both =
                [0, 1].map(|side| pair.get_item_by_index(side).ok().and_then(|text| text.as_str().map(String::from)));
            let [Some(question), Some(answer)] = both else {
                return Err(format!("history[{index}]: a list of two texts, this is {}", kind(pair)));
            };
            messages.extend([message("user", &question), message("assistant", &answer)]);
        }
    }
    let instruction = text(row, "instruction")?;
    let input = get(row, "input").map_or(Ok(String::new()), |_| text(row, "input"))?;
    let question = if input.is_empty() { instruction } else { format!("{instruction}\n{input}") };
    let answer = text(row, "output")?;
    if answer.trim().is_empty() {
        return Err("output: empty, there is nothing to learn; remove the row".into());
    }
    messages.extend([message("user", &question), message("assistant", &answer)]);
    Ok(messages)
}

/// Roles are known, contents are there, and something can be learned.
fn check(messages: &[Value], prompt: usize) -> Result<(), String> {
    let mut assistant = 0;
    for (index, message) in messages.iter().enumerate() {
        if check_message(index, message)? == "assistant" {
            let content = get(message, "content");
            let calls = get(message, "tool_calls").is_some_and(|calls| calls.is_true());
            let empty = content.is_none_or(|content| content.as_str().is_some_and(|text| text.trim().is_empty()));
            if empty && !calls {
                let what = "the assistant turn is empty, there is nothing to learn; remove it, or give it tool_calls";
                return Err(format!("messages[{index}].content: {what}"));
            }
            assistant += usize::from(index >= prompt);
        }
    }
    if assistant == 0 {
        let of = if prompt > 0 { "completion: no message" } else { "messages: none" };
        return Err(format!("{of} has the role `assistant`, there is nothing to learn; remove the row"));
    }
    Ok(())
}

/// The role of a message, which must be known, as its content must be there.
pub(super) fn check_message(index: usize, message: &Value) -> Result<String, String> {
    let at = format!("messages[{index}]");
    if message.kind() != ValueKind::Map {
        return Err(format!("{at}: an object with role and content, this is {}", kind(message)));
    }
    let role = text(message, "role").map_err(|what| format!("{at}.{what}"))?;
    if !ROLES.contains(&role.as_str()) {
        let nearest = ROLES.iter().max_by(|a, b| strsim::jaro(a, &role).total_cmp(&strsim::jaro(b, &role)));
        let nearest = nearest.expect("there are roles");
        let roles = ROLES.join(", ");
        return Err(format!("{at}.role: unknown role `{role}`; did you mean `{nearest}`? Known roles: {roles}"));
    }
    match get(message, "content") {
        Some(content) if !matches!(content.kind(), ValueKind::String | ValueKind::Seq) => {
            Err(format!("{at}.content: a text or a list of parts, this is {}", kind(&content)))
        }
        None if role != "assistant" => Err(format!("{at}.content: missing")),
        _ => Ok(role),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(json: &str) -> Vec<String> {
        let row = parse_row(json.as_bytes()).unwrap();
        row.messages.iter().map(|m| format!("{}: {}", text(m, "role").unwrap(), text(m, "content").unwrap())).collect()
    }

    fn refused(json: &str) -> String {
        parse_row(json.as_bytes()).unwrap_err()
    }

    #[test]
    fn all_forms_are_read() {
        let hi = ["user: Hi", "assistant: Hello"];
        assert_eq!(
            turns(r#"{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Hello"}]}"#),
            hi
        );
        assert_eq!(turns(r#"{"prompt":"Hi","completion":"Hello"}"#), hi);
        let lists =
            r#"{"prompt":[{"role":"user","content":"Hi"}],"completion":[{"role":"assistant","content":"Hello"}]}"#;
        assert_eq!(turns(lists), hi);
        assert_eq!(turns(r#"{"instruction":"Hi","input":"","output":"Hello"}"#), hi);
        let long = r#"{"system":"S","instruction":"Add","input":"2+2","output":"4","history":[["a","b"]]}"#;
        assert_eq!(turns(long), ["system: S", "user: a", "assistant: b", "user: Add\n2+2", "assistant: 4"]);
        assert_eq!(turns(r#"{"conversations":[{"from":"human","value":"Hi"},{"from":"gpt","value":"Hello"}]}"#), hi);
    }

    #[test]
    fn keys_of_bad_rows_are_named() {
        for (row, words) in [
            ("[1]", "a row is a JSON object, this is a list"),
            ("{\"messages\": [}", "not JSON: expected value at line 1 column 15"),
            (r#"{"text":"x","id":1}"#, "among text, id; there must be `messages`"),
            (r#"{"messages":"x"}"#, "messages: a list of messages, this is a string"),
            (r#"{"messages":[{"content":"x"}]}"#, "messages[0].role: missing"),
            (
                r#"{"messages":[{"role":"asistant","content":"x"}]}"#,
                "unknown role `asistant`; did you mean `assistant`?",
            ),
            (r#"{"messages":[{"role":"user"}]}"#, "messages[0].content: missing"),
            (r#"{"messages":[{"role":"user","content":"x"}]}"#, "none has the role `assistant`"),
            (
                r#"{"messages":[{"role":"assistant","content":" \n"}]}"#,
                "messages[0].content: the assistant turn is empty",
            ),
            (
                r#"{"messages":[{"role":"user","content":3}]}"#,
                "messages[0].content: a text or a list of parts, this is a number",
            ),
            (
                r#"{"messages":[{"role":"user","content":{"type":"text","text":"x"}}]}"#,
                "messages[0].content: a text or a list of parts, this is an object",
            ),
            (r#"{"prompt":"x","completion":" "}"#, "completion: empty"),
            (r#"{"prompt":"x"}"#, "completion: missing"),
            (r#"{"prompt":"x","completion":[]}"#, "prompt: a list of messages, this is a string"),
            (r#"{"instruction":"x","output":""}"#, "output: empty"),
            (r#"{"messages":[{"role":"assistant","content":"x"}],"tools":"{"}"#, "tools: a text that is not JSON"),
            (r#"{"conversations":[{"from":"bot","value":"x"}]}"#, "conversations[0].from: unknown speaker `bot`"),
        ] {
            let error = refused(row);
            assert!(error.contains(words), "{row}: {error}");
        }
        let calls = r#"{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":{}}}]}]}"#;
        assert!(parse_row(calls.as_bytes()).is_ok());
    }
}
