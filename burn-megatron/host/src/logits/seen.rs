//! The text that tokens are chosen for.

use std::collections::BTreeMap;

/// A text, with what rules count of it: kept as it grows, so that no step counts it anew.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    tokens: Vec<i64>,
    /// How many of them are not new.
    first: usize,
    /// By token: how often it is there, and how often it is new.
    counts: BTreeMap<i64, [usize; 2]>,
    encoder: Vec<i64>,
    /// Each token of the encoder once.
    encoder_once: Vec<i64>,
    stop_tokens: Vec<i64>,
    max_new_tokens: usize,
}

impl Seen {
    /// A text without new tokens after `before`: the prompt, or what a decoder begins with. `encoder` is the prompt in either
    /// case; a stop token ends the text, at most `max_new_tokens` come.
    pub fn new(before: &[i64], encoder: &[i64], stop_tokens: &[i64], max_new_tokens: usize) -> Self {
        let mut counts = BTreeMap::new();
        before.iter().for_each(|token| counts.entry(*token).or_insert([0; 2])[0] += 1);
        let mut encoder_once = encoder.to_vec();
        encoder_once.sort_unstable();
        encoder_once.dedup();
        Self {
            tokens: before.to_vec(),
            first: before.len(),
            counts,
            encoder: encoder.to_vec(),
            encoder_once,
            stop_tokens: stop_tokens.to_vec(),
            max_new_tokens,
        }
    }

    /// Another new token.
    pub fn push(&mut self, token: i64) {
        self.tokens.push(token);
        self.counts.entry(token).or_insert([0; 2]).iter_mut().for_each(|count| *count += 1);
    }

    /// Each token that is there, new or not, once.
    pub fn distinct(&self) -> impl Iterator<Item = i64> {
        self.counts.keys().copied()
    }

    /// Each token that is there, and how often it is new.
    pub fn counts(&self) -> impl Iterator<Item = (i64, usize)> {
        self.counts.iter().map(|(token, [_, new])| (*token, *new))
    }

    /// All tokens.
    pub(super) fn tokens(&self) -> &[i64] {
        &self.tokens
    }

    /// The new ones.
    pub(super) fn written(&self) -> &[i64] {
        &self.tokens[self.first..]
    }

    /// How many are new.
    pub(super) fn new_tokens(&self) -> usize {
        self.tokens.len() - self.first
    }

    /// Each new token, and how often it is there.
    pub(super) fn counted(&self) -> impl Iterator<Item = (i64, usize)> {
        self.counts().filter(|(_, new)| *new > 0)
    }

    pub(super) fn encoder(&self) -> &[i64] {
        &self.encoder
    }

    pub(super) fn encoder_once(&self) -> &[i64] {
        &self.encoder_once
    }

    pub(super) fn stop_tokens(&self) -> &[i64] {
        &self.stop_tokens
    }

    /// The next token is the last that is asked for.
    pub(super) fn is_last(&self) -> bool {
        self.new_tokens() + 1 == self.max_new_tokens
    }
}
