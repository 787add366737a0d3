//! What is asked of a server's ranks, and what they answer. Tokens, no text.

use std::sync::Arc;

use thiserror::Error;

use crate::generate::{GenerateError, Sampling, TokenLogprobs};
use crate::logits::LogitsProcessors;

/// One sequence to continue.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Which of the models: its number.
    pub model: usize,
    /// The tokens to continue.
    pub prompt: Vec<i64>,
    /// Most new tokens, at least one.
    pub max_tokens: usize,
    /// Tokens that end the text; the one that does is its last.
    pub stop_tokens: Vec<i64>,
    /// How each token is chosen.
    pub sampling: Sampling,
    /// What changes the logits before.
    pub processors: Arc<LogitsProcessors>,
    /// Log-probabilities of the chosen tokens, and of so many of the likeliest.
    pub logprobs: Option<usize>,
    /// Log-probabilities of the prompt's tokens too.
    pub prompt_logprobs: bool,
}

impl Request {
    /// The likeliest tokens after a prompt, so many at most.
    pub fn greedy(prompt: Vec<i64>, max_tokens: usize) -> Self {
        let sampling = Sampling::greedy();
        let (stop_tokens, processors, logprobs) = (Vec::new(), Arc::default(), None);
        Self { model: 0, prompt, max_tokens, stop_tokens, sampling, processors, logprobs, prompt_logprobs: false }
    }

    /// Whether a server for sequences of at most `max_model_len` tokens of a vocabulary can answer this. The error
    /// names what it cannot do, and the limit.
    pub fn check(&self, vocab_size: usize, max_model_len: usize) -> Result<(), RequestError> {
        if self.prompt.is_empty() {
            return Err(GenerateError::EmptyPrompt.into());
        }
        if let Some(&token) = self.prompt.iter().find(|token| !(0..vocab_size as i64).contains(token)) {
            return Err(GenerateError::UnknownToken { token, vocab_size }.into());
        }
        self.sampling.check()?;
        self.processors.check().map_err(GenerateError::Processors)?;
        if self.max_tokens == 0 {
            return Err(RequestError::NoTokens);
        }
        if self.prompt.len().saturating_add(self.max_tokens) > max_model_len {
            let (prompt, max_tokens) = (self.prompt.len(), self.max_tokens);
            return Err(RequestError::TooLong { prompt, max_tokens, max_model_len });
        }
        Ok(())
    }
}

/// Why a request cannot be answered.
#[derive(Clone, Debug, PartialEq, Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum RequestError {
    /// As for one text.
    #[error(transparent)]
    Generate(#[from] GenerateError),
    /// Nothing is asked for.
    #[error("max_tokens 0: at least 1 is needed")]
    NoTokens,
    /// The sequence would be longer than the server takes.
    #[error(
        "a prompt of {prompt} tokens and max_tokens {max_tokens} are more than the {max_model_len} of --max-model-len; {}",
        nearest(*prompt, *max_model_len)
    )]
    TooLong { prompt: usize, max_tokens: usize, max_model_len: usize },
}

fn nearest(prompt: usize, max_model_len: usize) -> String {
    match max_model_len.saturating_sub(prompt) {
        0 => format!("at most {} tokens of prompt", max_model_len - 1),
        left => format!("at most {left} new tokens"),
    }
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// Its last token is one of the stop tokens.
    Stop,
    /// It has as many tokens as asked for.
    Length,
}

/// What becomes of a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The prompt was read, for a request that asks for the log-probabilities of its tokens: of all but the first.
    Prompt(Vec<TokenLogprobs>),
    /// So many tokens of the prompt were in the cache, before the first token. Not said of none.
    Cached(usize),
    /// A new token.
    Token {
        /// The token.
        token: i64,
        /// If asked for.
        logprobs: Option<TokenLogprobs>,
        /// If it is the last one.
        finish: Option<Finish>,
    },
    /// There is no more, for this reason.
    Failed(String),
    /// There is no more, because what the request asks for contradicts itself in this way.
    Refused(String),
}
