//! An answer as it is written, token by token.

use std::ops::ControlFlow;

use tokenizers::Tokenizer;

use crate::generate::TextStream;

/// The text so far.
pub(super) struct Answer<'a> {
    stream: TextStream<'a>,
    text: String,
    until: &'a [String],
    stop_tokens: &'a [i64],
}

impl<'a> Answer<'a> {
    /// That follows the tokens `before`, and ends with one of `stop_tokens`, which is not part of it, or with one of the texts
    /// `until`.
    pub fn new(tokenizer: &'a Tokenizer, before: &[i64], until: &'a [String], stop_tokens: &'a [i64]) -> Self {
        Self { stream: TextStream::after(tokenizer, before), text: String::new(), until, stop_tokens }
    }

    /// Says whether another token is wanted.
    pub fn push(&mut self, token: i64) -> ControlFlow<()> {
        if !self.stop_tokens.contains(&token) {
            self.text += &self.stream.push(token).unwrap_or_default();
        }
        match self.until.iter().any(|end| !end.is_empty() && self.text.contains(end.as_str())) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }

    /// All of it.
    pub fn finish(mut self) -> String {
        self.text += &self.stream.rest().unwrap_or_default();
        self.text
    }
}
