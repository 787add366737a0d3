//! Log-probabilities in the forms of the two endpoints.

use serde_json::{Map, Value, json};
use tokenizers::Tokenizer;

use crate::data::token_bytes;
use crate::serve::{Likely, TokenLogprobs};

/// The text of a token by itself.
pub(super) fn token_text(tokenizer: &Tokenizer, token: i64) -> String {
    tokenizer.decode(&[token as u32], false).unwrap_or_default()
}

/// A token of a chat's answer.
pub(super) fn of_chat(tokenizer: &Tokenizer, token: i64, logprobs: &TokenLogprobs) -> Value {
    let of = |token: i64, logprob: f64| {
        let text = token_text(tokenizer, token);
        json!({"token": text, "logprob": logprob, "bytes": token_bytes(tokenizer, token as u32)})
    };
    let mut all = of(token, logprobs.logprob);
    all["top_logprobs"] = logprobs.top.iter().map(|likely| of(likely.token, likely.logprob)).collect();
    all
}

/// The tokens of a part of a completion.
#[derive(Debug, Default)]
pub(super) struct OfCompletion {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f64>>,
    top_logprobs: Vec<Option<Map<String, Value>>>,
    text_offset: Vec<usize>,
}

impl OfCompletion {
    /// Adds a token; `offset` counts the characters before it and moves on. Only the first of a prompt has no
    /// log-probability.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: i64, logprobs: Option<&TokenLogprobs>, offset: &mut usize) {
        let text = token_text(tokenizer, token);
        self.text_offset.push(*offset);
        *offset += text.chars().count();
        self.tokens.push(text);
        self.token_logprobs.push(logprobs.map(|logprobs| logprobs.logprob));
        let top = |Likely { token, logprob }: &Likely| (token_text(tokenizer, *token), json!(logprob));
        // OpenAI's has the token itself too, whether or not it is among the likeliest.
        let all = |of: &TokenLogprobs| {
            let mut all = Map::new();
            // Tokens may have the same text: parts of characters. The likeliest stands for them, but for the token itself.
            for (text, logprob) in of.top.iter().map(top) {
                all.entry(text).or_insert(logprob);
            }
            all.insert(self.tokens.last().cloned().unwrap_or_default(), json!(of.logprob));
            all
        };
        self.top_logprobs.push(logprobs.map(all));
    }

    pub fn json(&self) -> Value {
        json!({
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        })
    }
}
