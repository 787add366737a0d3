//! Tokens to standard output as they come.

use std::io;
use std::ops::ControlFlow;

use anyhow::{Result, anyhow};
use tokenizers::Tokenizer;

use super::super::write_now;
use crate::generate::TextStream;

/// Writes tokens to standard output as they come.
pub(super) struct Writer<'a> {
    /// Ids of the tokens are written, if there is none.
    stream: Option<TextStream<'a>>,
    /// What is written before the next token.
    before: String,
    failure: Option<anyhow::Error>,
}

impl<'a> Writer<'a> {
    /// Writes the ids of the new tokens, comma separated.
    pub(super) fn ids() -> Self {
        Self { stream: None, before: String::new(), failure: None }
    }

    /// Writes the prompt and its continuation; `tokens` are the prompt's.
    pub(super) fn text(tokenizer: &'a Tokenizer, prompt: String, tokens: &[i64]) -> Self {
        Self { stream: Some(TextStream::after(tokenizer, tokens)), before: prompt, failure: None }
    }

    /// Breaks off when it cannot be written; why is for [`finish`](Self::finish) to say.
    pub(super) fn push(&mut self, token: i64) -> ControlFlow<()> {
        let text = match &mut self.stream {
            None => Ok(token.to_string()),
            Some(stream) => stream.push(token).map_err(|error| anyhow!("token {token}: {error}")),
        };
        let after = if self.stream.is_some() { "" } else { "," };
        let before = std::mem::replace(&mut self.before, after.to_string());
        self.put(text.map(|text| before + &text));
        if self.failure.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// Writes what was held back. Fails if something could not be written, unless the reader has closed the output.
    pub(super) fn finish(mut self) -> Result<()> {
        if self.failure.is_none() {
            let rest = self.stream.as_ref().map_or(Ok(String::new()), TextStream::rest);
            // Before the first token that is the prompt.
            let before = if self.stream.is_some() { std::mem::take(&mut self.before) } else { String::new() };
            self.put(rest.map(|rest| before + &rest + "\n").map_err(|error| anyhow!("the end of the text: {error}")));
        }
        match self.failure {
            // A reader that has seen enough (`| head`) is no failure.
            Some(error) if error.downcast_ref().is_some_and(|e: &io::Error| e.kind() == io::ErrorKind::BrokenPipe) => {
                Ok(())
            }
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    fn put(&mut self, text: Result<String>) {
        self.failure = text.and_then(|text| Ok(write_now(&text)?)).err();
    }
}
