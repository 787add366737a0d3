//! Why a model does not write.

use indicatif::HumanBytes;
use thiserror::Error;

/// Why nothing, or nothing more, can be generated.
#[derive(Clone, Debug, PartialEq, Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum GenerateError {
    /// There is nothing to continue.
    #[error("the prompt has no tokens; a model needs at least one to continue")]
    EmptyPrompt,
    /// The prompt is not of the model's vocabulary.
    #[error("the prompt has token {token}, the model knows 0..{vocab_size}")]
    UnknownToken { token: i64, vocab_size: usize },
    /// A learned position is needed for every token that is read; the last new token is not read.
    #[error(
        "a prompt of {prompt} tokens and {new} new ones need {} positions, the model has {positions}; {}",
        prompt.saturating_add(*new) - 1, shorter(*prompt, *positions)
    )]
    TooLong { prompt: usize, new: usize, positions: usize },
    /// The window is longer than the model's positions, or leaves nothing to resume from.
    #[error("a window of {window} tokens; nearest legal: {nearest}")]
    Window { window: usize, nearest: usize },
    /// The keys and values of so many positions are more than there is memory.
    #[error(
        "{new} new tokens: keys and values of {positions} positions take {}, {} are available; {}, or a window of at most \
         {fitting} tokens", HumanBytes(*bytes), HumanBytes(*available), shorter(*prompt, *fitting)
    )]
    Memory { new: usize, positions: usize, bytes: u64, available: u64, fitting: usize, prompt: usize },
    /// An option of the sampling is out of its range.
    #[error("{option} {value} is not {range}")]
    Sampling { option: &'static str, value: f64, range: &'static str },
    /// The model's output is of no use.
    #[error(
        "after {position} tokens the model gives a logit of {value}: its weights are broken or overflow in its precision"
    )]
    NotFinite { position: usize, value: f64 },
    /// A rule on logits has a number that leaves no logits.
    #[error("{0}")]
    Processors(String),
    /// What is asked for contradicts itself.
    #[error("after {position} tokens no token may come: {rules} forbid all")]
    Forbidden { position: usize, rules: String },
}

/// Why no token can be chosen.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum NoChoice {
    /// The model's logit is this.
    NotFinite(f64),
    /// Rules of these names leave no token.
    Forbidden(String),
}

impl NoChoice {
    /// The error of a text of so many tokens.
    pub fn after(self, position: usize) -> GenerateError {
        match self {
            Self::NotFinite(value) => GenerateError::NotFinite { position, value },
            Self::Forbidden(rules) => GenerateError::Forbidden { position, rules },
        }
    }
}

fn shorter(prompt: usize, positions: usize) -> String {
    match positions + 1 > prompt {
        true => format!("at most {} new tokens", positions + 1 - prompt),
        false => format!("at most {positions} tokens of prompt"),
    }
}
