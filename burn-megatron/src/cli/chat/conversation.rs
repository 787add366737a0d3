//! What was said, and the commands of a conversation.

use std::sync::Arc;

use crate::data::chat::ChatTokenizer;

/// What a line of input asks for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Line<'a> {
    /// Nothing.
    Empty,
    /// An answer.
    Say(&'a str),
    /// A conversation from its beginning.
    Reset,
    /// The same, with this system message; without one if it is empty.
    System(&'a str),
    /// Another adapter.
    Adapter(&'a str),
    /// What there is.
    Help,
    /// The end.
    Quit,
    /// A command that there is not.
    Unknown(&'a str),
}

pub(super) const COMMANDS: &str =
    "/reset begins anew, /system TEXT also with another system message, /adapter NAME switches, /quit ends";

impl<'a> Line<'a> {
    /// Commands begin with a slash and are words of letters: `/usr/bin` is said to the model.
    pub fn parse(line: &'a str) -> Self {
        let line = line.trim();
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match word.strip_prefix('/') {
            None if line.is_empty() => Self::Empty,
            Some("quit" | "exit") => Self::Quit,
            Some("reset") => Self::Reset,
            Some("system") => Self::System(rest.trim()),
            Some("adapter") => Self::Adapter(rest.trim()),
            Some("help") => Self::Help,
            Some(name) if !name.is_empty() && name.chars().all(char::is_alphabetic) => Self::Unknown(word),
            _ => Self::Say(line),
        }
    }
}

/// Messages, as roles and contents.
pub(super) struct Conversation {
    tokenizer: ChatTokenizer,
    /// Tokens that the model knows.
    vocab_size: usize,
    /// Most tokens of all messages.
    room: usize,
    messages: Vec<(String, String)>,
}

impl Conversation {
    pub fn new(tokenizer: ChatTokenizer, vocab_size: usize, room: usize, system: Option<String>) -> Self {
        let mut conversation = Self { tokenizer, vocab_size, room, messages: Vec::new() };
        conversation.begin(system.as_deref());
        conversation
    }

    /// Forgets what was said, but for the system message.
    pub fn reset(&mut self) {
        self.messages.truncate(self.start());
    }

    /// Forgets everything.
    pub fn begin(&mut self, system: Option<&str>) {
        self.messages = system.map(|text| ("system".into(), text.into())).into_iter().collect();
    }

    /// Messages before the first of the user.
    fn start(&self) -> usize {
        usize::from(self.messages.first().is_some_and(|(role, _)| role == "system"))
    }

    /// The tokens to answer, and how many of the oldest messages were left out to make room. Fails if the message alone
    /// is too long, or the chat template fails; nothing was said then.
    pub fn say(&mut self, text: &str) -> Result<(Arc<[i64]>, usize), String> {
        let mut messages = self.messages.clone();
        messages.push(("user".into(), text.into()));
        let (start, all) = (self.start(), messages.len());
        loop {
            let tokens = self.tokens(&messages)?;
            if tokens.len() <= self.room {
                let left_out = all - messages.len();
                self.messages = messages;
                return Ok((tokens.into(), left_out));
            }
            if messages.len() < start + 3 {
                return Err(format!(
                    "the message has {} tokens with what the template adds, there is room for {}: say less, or give --max-new-tokens \
                     a smaller number",
                    tokens.len(),
                    self.room
                ));
            }
            // A question and its answer.
            messages.drain(start..start + 2);
        }
    }

    /// Remembers an answer.
    pub fn answered(&mut self, text: &str) {
        self.messages.push(("assistant".into(), text.trim().into()));
    }

    fn tokens(&self, messages: &[(String, String)]) -> Result<Vec<i64>, String> {
        let text = self.tokenizer.prompt(messages)?;
        let encoded = self.tokenizer.tokenizer().encode_fast(text, false);
        let ids = encoded.map_err(|error| format!("the text has no tokens: {error}"))?;
        if let Some(id) = ids.get_ids().iter().find(|id| **id as usize >= self.vocab_size) {
            let (text, most) = (self.tokenizer.tokenizer().id_to_token(*id).unwrap_or_default(), self.vocab_size);
            return Err(format!(
                "the text has token {id}, `{text}`, the model knows 0..{most}: its tokenizer has more tokens"
            ));
        }
        Ok(ids.get_ids().iter().map(|id| i64::from(*id)).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn commands_are_words_after_a_slash() {
        assert_eq!(Line::parse(" /reset "), Line::Reset);
        assert_eq!(Line::parse("/system  Be brief. "), Line::System("Be brief."));
        assert_eq!(Line::parse("/system"), Line::System(""));
        assert_eq!(Line::parse("/adapter  b "), Line::Adapter("b"));
        assert_eq!(
            [Line::parse("/quit"), Line::parse("  "), Line::parse("/help")],
            [Line::Quit, Line::Empty, Line::Help]
        );
        assert_eq!(Line::parse("/sytem x"), Line::Unknown("/sytem"));
        assert_eq!(Line::parse("/usr/bin is a folder"), Line::Say("/usr/bin is a folder"));
        assert_eq!(Line::parse("a /quit"), Line::Say("a /quit"));
    }

    /// A token per letter; a message has its role's first letter, its text and a newline.
    fn conversation(room: usize, system: Option<&str>) -> Conversation {
        conversation_of(27, room, system)
    }

    fn conversation_of(vocab_size: usize, room: usize, system: Option<&str>) -> Conversation {
        let folder = tempfile::tempdir().unwrap();
        let vocab: serde_json::Map<String, serde_json::Value> =
            ('a'..='z').chain(['\n']).enumerate().map(|(id, letter)| (letter.to_string(), id.into())).collect();
        let json = serde_json::json!({"version": "1.0", "model": {"type": "BPE", "vocab": vocab, "merges": []}});
        fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
        let template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}a{% endif %}";
        fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
        Conversation::new(ChatTokenizer::open(folder.path(), None).unwrap(), vocab_size, room, system.map(String::from))
    }

    fn text(turn: &[i64]) -> String {
        turn.iter().map(|id| if *id == 26 { '.' } else { char::from(b'a' + *id as u8) }).collect()
    }

    #[test]
    fn the_history_is_kept_until_it_is_reset() {
        let mut talk = conversation(100, Some("xx"));
        assert_eq!(text(&talk.say("hi").unwrap().0), "sxx.uhi.a");
        talk.answered(" yo\n");
        assert_eq!(text(&talk.say("go").unwrap().0), "sxx.uhi.ayo.ugo.a");
        talk.reset();
        assert_eq!(text(&talk.say("go").unwrap().0), "sxx.ugo.a");
        talk.begin(None);
        assert_eq!(text(&talk.say("go").unwrap().0), "ugo.a");
    }

    #[test]
    fn the_oldest_messages_make_room() {
        let mut talk = conversation(14, Some("xx"));
        talk.say("hi").unwrap();
        talk.answered("yo");
        let (turn, left_out) = talk.say("go").unwrap();
        assert_eq!((text(&turn).as_str(), left_out), ("sxx.ugo.a", 2));
        let refused = talk.say("abcdefghijklm").unwrap_err();
        says!(refused, "there is room for 14");
        talk.answered("yo");
        assert_eq!(text(&talk.say("b").unwrap().0), "sxx.ub.a", "what was refused is forgotten");
    }

    /// A token `<image>` or another that was added later, and for which the model has no embedding.
    #[test]
    fn tokens_that_the_model_does_not_have_are_refused() {
        let mut talk = conversation_of(25, 100, None);
        let refused = "the text has token 25, `z`, the model knows 0..25: its tokenizer has more tokens";
        // The newline after a message is token 26.
        assert_eq!(talk.say("az").unwrap_err(), refused);
        says!(talk.say("a").unwrap_err(), "the text has token 26");
        let mut talk = conversation_of(27, 100, None);
        assert_eq!(text(&talk.say("az").unwrap().0), "uaz.a");
    }
}
