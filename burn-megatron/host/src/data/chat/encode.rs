//! A conversation to ids and masks.

use std::ops::Range;
use std::path::Path;

use minijinja::value::Value;
use tokenizers::Tokenizer;

use super::error::Result;
use super::folder::{Folder, OTHER_TEMPLATE, Source};
use super::jinja::{Rendered, Template};
use super::row::Conversation;
use super::turns::{by_prefixes, with_weight};
use super::values::{get, message, text as text_of};

/// A tokenizer with its chat template.
pub struct ChatTokenizer {
    tokenizer: Tokenizer,
    /// Without tools and with them.
    templates: [Compiled; 2],
}

struct Compiled {
    template: Template,
    /// Special tokens by name.
    variables: Vec<(String, Value)>,
    /// Words such as `<|im_end|>` that it writes and that are no tokens.
    missing: Vec<String>,
}

/// A conversation as tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatSample {
    /// What the template made of it.
    pub text: String,
    /// Token ids of the text.
    pub ids: Vec<u32>,
    /// By token: an assistant wrote it, and it is to be learned.
    pub mask: Vec<bool>,
    /// The tokens of each assistant turn that is to be learned, ascending.
    pub turns: Vec<Range<usize>>,
}

impl ChatTokenizer {
    /// Reads a folder with a `tokenizer.json`, or names that file. Without `template` its own template is taken, from
    /// `chat_template.jinja` or `tokenizer_config.json`.
    ///
    /// # Errors
    /// If files cannot be read, there is no template, its syntax is wrong, or it writes special tokens that the folder
    /// does not have.
    pub fn open(path: &Path, template: Option<&Path>) -> Result<Self> {
        let folder = Folder::open(path, template)?;
        let compile = |source: &Source| {
            let template = source.compile()?;
            let variables = folder.variables(&template, source)?;
            let unknown = |word: &&String| folder.tokenizer.token_to_id(word).is_none();
            let missing = template.special.iter().filter(unknown).cloned().collect();
            Ok(Compiled { template, variables, missing })
        };
        let [plain, tools] = &folder.templates;
        let templates = [compile(plain)?, compile(tools)?];
        Ok(Self { tokenizer: folder.tokenizer, templates })
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Text, ids and masks of a conversation, as `apply_chat_template` of transformers gives them, but that gaps between
    /// the offsets of tokens (`trim_offsets`) end no mask. A template without generation blocks has turns where each adds
    /// to the text before it.
    ///
    /// # Errors
    /// If the template fails, drops a message or its assistant turns, or writes special tokens that are none.
    pub fn encode(&self, row: &Conversation) -> Result<ChatSample, String> {
        let compiled = &self.templates[usize::from(row.tools.is_some())];
        let render = |count: usize, prompted: bool| compiled.template.render(&context(compiled, row, count, prompted));
        let all = row.messages.len();
        let Rendered { text, assistant } = render(all, row.add_generation_prompt)
            .map_err(|error| format!("messages: the chat template fails: {error}"))?;
        no_missing(compiled, &text)?;
        check_contents(&text, row)?;
        let mut spans = match compiled.template.marks_assistant {
            true => assistant,
            false => {
                let is_assistant = |index: &usize| {
                    get(&row.messages[*index], "role").is_some_and(|role| role.as_str() == Some("assistant"))
                };
                let turns: Vec<usize> = (row.prompt..all).filter(is_assistant).collect();
                by_prefixes(&text, &turns, |count, prompted| Ok(render(count, prompted)?.text))?
            }
        };
        if row.prompt > 0 && compiled.template.marks_assistant {
            let prompt =
                render(row.prompt, true).map_err(|error| format!("prompt: the chat template fails: {error}"))?.text;
            if !text.starts_with(&prompt) {
                return Err("prompt: the chat template writes it in another way when a completion follows; write the row with `messages`".into());
            }
            spans.retain(|span| span.start >= prompt.len());
        }
        self.tokens(text, &with_weight(spans, &row.messages, row.prompt)?)
    }

    /// The text of messages (role and content), and the beginning of the assistant's next turn: what a model is to
    /// continue.
    ///
    /// # Errors
    /// If the template fails, or writes special tokens that are none.
    pub fn prompt(&self, messages: &[(String, String)]) -> Result<String, String> {
        let row = Conversation {
            messages: messages.iter().map(|(role, content)| message(role, content)).collect(),
            prompt: 0,
            tools: None,
            add_generation_prompt: true,
            variables: Vec::new(),
        };
        self.prompt_of(&row)
    }

    /// The same of a conversation with whatever its template takes. The text of a [continued](Conversation::continued) one ends
    /// with what its last message says.
    ///
    /// # Errors
    /// As [`prompt`](Self::prompt); if there are tools and the template has no place for them, the conversation has special tokens
    /// of its own, or the template writes the message that is continued otherwise.
    pub fn prompt_of(&self, row: &Conversation) -> Result<String, String> {
        let compiled = &self.templates[usize::from(row.tools.is_some())];
        if row.tools.is_some() && !compiled.template.variables().iter().any(|name| name == "tools") {
            return Err("tools: the chat template has no place for them".into());
        }
        // The folder says what these are.
        if let Some((name, _)) = row.variables.iter().find(|(name, _)| name.ends_with("_token")) {
            return Err(format!("chat_template_kwargs: `{name}` is a special token of the tokenizer; leave it out"));
        }
        let render = |row: &Conversation| {
            let context = context(compiled, row, row.messages.len(), row.add_generation_prompt);
            let rendered = compiled.template.render(&context);
            Ok::<_, String>(rendered.map_err(|error| format!("the chat template fails: {error}"))?.text)
        };
        let text = if row.add_generation_prompt { render(row)? } else { row.up_to_its_end(render)? };
        no_missing(compiled, &text)?;
        check_contents(&text, row)?;
        Ok(text)
    }

    /// Tokens of `text`; those that overlap `spans` (bytes) are to be learned.
    fn tokens(&self, text: String, spans: &[Range<usize>]) -> Result<ChatSample, String> {
        let encoding =
            self.tokenizer.encode(text.as_str(), false).map_err(|error| format!("the text has no tokens: {error}"))?;
        let ids = encoding.get_ids().to_vec();
        let offsets = encoding.get_offsets();
        let (mut mask, mut turns) = (vec![false; ids.len()], Vec::new());
        for span in spans.iter().filter(|span| !span.is_empty()) {
            // A token of spaces alone has no length where a tokenizer trims offsets: it is where it ends.
            let begins = |start: usize, end: usize| start < span.end || start == end && end == span.end;
            let is_of_turn = |(start, end): &(usize, usize)| *end > span.start && begins(*start, *end);
            let Some(first) = offsets.iter().position(is_of_turn) else { continue };
            let end = offsets.iter().rposition(is_of_turn).map_or(first, |last| last + 1);
            mask[first..end].fill(true);
            turns.push(first..end);
        }
        if turns.is_empty() {
            let what = "the chat template marks no token of an assistant; check its {% generation %} blocks";
            return Err(what.into());
        }
        Ok(ChatSample { text, ids, mask, turns })
    }
}

/// Special tokens that a template has written are tokens.
fn no_missing(compiled: &Compiled, text: &str) -> Result<(), String> {
    match compiled.missing.iter().find(|word| text.contains(*word)) {
        None => Ok(()),
        Some(word) => Err(format!(
            "the chat template writes {word}, which is no token of the tokenizer; add it to added_tokens of tokenizer.json, or \
             give a template that fits the tokenizer: {OTHER_TEMPLATE}"
        )),
    }
}

/// The variables of a template for the first `count` messages.
fn context(compiled: &Compiled, row: &Conversation, count: usize, prompted: bool) -> Value {
    let own = [
        ("messages".to_string(), Value::from(row.messages[..count].to_vec())),
        ("tools".into(), row.tools.clone().unwrap_or_else(|| Value::from(()))),
        ("documents".into(), Value::from(())),
        ("add_generation_prompt".into(), Value::from(prompted)),
    ];
    let special = compiled.variables.iter().cloned();
    special.chain(own).chain(row.variables.iter().cloned()).collect()
}

/// What a user or a system said must be in the text: a template may drop roles that it does not know.
fn check_contents(rendered: &str, row: &Conversation) -> Result<(), String> {
    for (index, message) in row.messages.iter().enumerate() {
        let role = text_of(message, "role").unwrap_or_default();
        let Some(content) = get(message, "content") else { continue };
        let Some(content) = content.as_str() else { continue };
        // What the last line says is there in any case; JSON writes other quotes and newlines.
        let says = |line: &&str| line.len() > 1 && !line.contains(['"', '\\']);
        let line = content.lines().map(str::trim).rev().find(says);
        if let Some(line) = line.filter(|line| role != "assistant" && !rendered.contains(line)) {
            let start: String = line.chars().take(40).collect();
            return Err(format!(
                "messages[{index}]: the chat template drops this message with the role `{role}` (`{start}`); use a role that it knows, \
                 or another template"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::chat::parse_prompt;

    fn with_template(template: &str) -> ChatTokenizer {
        let folder = tempfile::tempdir().unwrap();
        let vocab: serde_json::Map<String, serde_json::Value> =
            ('a'..='z').zip(0..).map(|(letter, id)| (letter.to_string(), id.into())).collect();
        let json = serde_json::json!({"version": "1.0", "model": {"type": "BPE", "vocab": vocab, "merges": []}});
        std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
        std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
        ChatTokenizer::open(folder.path(), None).unwrap()
    }

    /// As clients have them, key by key.
    #[test]
    fn tools_and_calls_keep_the_order_of_their_keys() {
        let chat = with_template(
            "{{ tools | tojson }}{% for m in messages %}{{ (m.tool_calls or m.content) | tojson }}{% endfor %}",
        );
        let text = r#"{"tools": [{"type": "function", "function": {"name": "f", "b": 1, "a": 2}}], "messages": [
            {"role": "assistant", "content": null, "refusal": null, "tool_calls": [{"id": "1", "function": {"name": "f",
            "arguments": "{\"y\": 1, \"x\": 2}"}}]}, {"role": "tool", "content": [{"type": "text", "text": "ok"}]}]}"#;
        let expected = r#"[{"type": "function", "function": {"name": "f", "b": 1, "a": 2}}][{"id": "1", "function": {"name": "f", "#;
        let row = parse_prompt(text.as_bytes()).unwrap();
        assert_eq!(chat.prompt_of(&row).unwrap(), format!(r#"{expected}"arguments": {{"y": 1, "x": 2}}}}}}]"ok""#));
        let none = parse_prompt(text.replace(r#"{\"y\": 1, \"x\": 2}"#, "").as_bytes()).unwrap();
        assert_eq!(chat.prompt_of(&none).unwrap(), format!(r#"{expected}"arguments": {{}}}}}}]"ok""#));
    }

    #[test]
    fn what_a_template_cannot_say_is_refused() {
        let chat = with_template("{% for m in messages %}{{ m.content | replace('x', 'z') }}{% endfor %}");
        let prompt = |json: &str| chat.prompt_of(&parse_prompt(json.as_bytes())?);
        let with = |content: &str, more: &str| {
            format!(r#"{{"messages": [{{"role": "assistant", "content": "{content}"}}]{more}}}"#)
        };
        let tools = r#", "tools": [{"function": {"name": "f"}}]"#;
        assert!(prompt(&with("a", tools)).unwrap_err().starts_with("tools: the chat template has no place"));
        for name in ["messages", "tools", "documents", "add_generation_prompt", "bos_token"] {
            let error = prompt(&with("a", &format!(r#", "chat_template_kwargs": {{"{name}": "b"}}"#))).unwrap_err();
            assert!(error.starts_with(&format!("chat_template_kwargs: `{name}` is")), "{error}");
        }
        assert!(parse_prompt(br#"{"messages": []}"#).unwrap_err().contains("at least one message"));
        assert_eq!(parse_prompt(b"[1]").unwrap_err(), "a list, not a JSON object");
    }

    /// Where the template writes the last message, even if its words come again behind it.
    #[test]
    fn a_continued_message_ends_where_its_text_ends() {
        let prompt = |template: &str, json: &str| {
            with_template(template).prompt_of(&parse_prompt(json.as_bytes()).unwrap().continued())
        };
        let said = |content: &str| format!(r#"{{"messages": [{{"role": "assistant", "content": "{content}"}}]}}"#);
        let plain = "{% for m in messages %}<{{ m.content }}>{% endfor %} end";
        assert_eq!(prompt(plain, &said("end")).unwrap(), "<end");
        assert_eq!(prompt(plain, &said("a b ")).unwrap(), "<a b ", "spaces are the message's");
        let trimmed = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}";
        assert_eq!(prompt(trimmed, &said("a b ")).unwrap(), "<a b");
        let other = "{% for m in messages %}{{ m.content | replace('x', 'z') }}{% endfor %}";
        assert!(prompt(other, &said("x")).unwrap_err().contains("changes this message"));
        for template in ["{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "nothing"] {
            assert!(prompt(template, &said("x")).unwrap_err().contains("does not write this message once"));
        }
        let call = r#"{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}"#;
        for json in [call, &said(" ")] {
            assert!(prompt(plain, json).unwrap_err().starts_with("messages[0].content: there is no text"));
        }
    }
}
