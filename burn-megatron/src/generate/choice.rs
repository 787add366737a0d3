//! What is wanted of the logits of a step, and what comes of it.

use std::sync::Arc;

use super::{Sampling, TextRules};

/// A token and its log-probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Likely {
    /// The token.
    pub token: i64,
    /// Its log-probability.
    pub logprob: f64,
}

/// The log-probability of a token after those before it, `log softmax` of the model's logits, before penalty,
/// temperature and top-k.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Of the token itself.
    pub logprob: f64,
    /// The likeliest tokens at its place, likeliest first.
    pub top: Vec<Likely>,
}

/// What is wanted of one line of logits.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Choice {
    /// Nothing: more of the prompt follows.
    None,
    /// The next token, as new token number `index`, and log-probabilities if there is a number of likeliest tokens.
    Next {
        /// How it is chosen.
        sampling: Sampling,
        /// What else changes its logits, with the tokens before it.
        rules: Option<Arc<TextRules>>,
        /// Which draw this is.
        index: u64,
        /// Log-probabilities of it and so many of the likeliest.
        logprobs: Option<usize>,
    },
    /// The log-probabilities of a token that is known, and of so many of the likeliest.
    Known {
        /// The token.
        token: i64,
        /// Number of the likeliest.
        top: usize,
    },
}

/// A token and, if asked for, its log-probabilities.
pub(crate) type Chosen = (i64, Option<TokenLogprobs>);

impl Choice {
    /// New token number `index` of a text.
    pub fn next(sampling: Sampling, rules: &Option<Arc<TextRules>>, index: usize, logprobs: Option<usize>) -> Self {
        Self::Next { sampling, rules: rules.clone(), index: index as u64, logprobs }
    }
}
