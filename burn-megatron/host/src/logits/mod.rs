//! What changes a model's logits before a token is chosen: rules of transformers' (`generation/logits_process.py`), under
//! its names, in its order, and the penalties of OpenAI's.

mod changes;
mod check;
mod seen;
#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use changes::{Change, Changes};
pub use seen::Seen;

pub use crate::json_grammar::Guide;
use crate::json_grammar::TokenSet;

/// Rules by which some tokens come more often, less often or not at all. The default changes nothing. Tokens that the
/// vocabulary does not have are passed over.
///
/// ```
/// use host::logits::{LogitsProcessors, Seen};
///
/// let rules = LogitsProcessors { no_repeat_ngram_size: 2, ..LogitsProcessors::default() };
/// let mut logits = [0.0, 3.0, 2.0];
/// // After `0 1 0` another 1 would be the second `0 1`.
/// rules.changes(&Seen::new(&[0, 1, 0], &[0, 1, 0], &[], 5), 1.0, logits.len()).apply(&mut logits);
/// assert_eq!(logits, [0.0, f64::NEG_INFINITY, 2.0]);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogitsProcessors {
    /// Added to the logit of the last token of each sequence, where the text ends with the others.
    pub sequence_bias: Vec<(Vec<i64>, f64)>,
    /// Positive logits of the prompt's tokens are multiplied by this, negative ones divided: above 1 they come more often.
    pub encoder_repetition_penalty: Option<f64>,
    /// No sequence of so many tokens comes twice; 0 is no rule.
    pub no_repeat_ngram_size: usize,
    /// No sequence of so many tokens of the prompt comes in the text; 0 is no rule.
    pub encoder_no_repeat_ngram_size: usize,
    /// Sequences that do not come. One that is a stop token alone is passed over.
    pub bad_words_ids: Vec<Vec<i64>>,
    /// Without a stop token before prompt and text are so long, unless a guide's text can only end.
    pub min_length: usize,
    /// Without a stop token before so many new ones, unless a guide's text can only end.
    pub min_new_tokens: usize,
    /// The second token, if there was only one before.
    pub forced_bos_token_id: Option<i64>,
    /// One of these is the last token that is asked for.
    pub forced_eos_token_id: Vec<i64>,
    /// `(start, factor)`: with `n` new tokens more than `start`, the logit of a stop token grows by
    /// `|logit| · (factorⁿ − 1)`.
    pub exponential_decay_length_penalty: Option<(usize, f64)>,
    /// Tokens that do not come.
    pub suppress_tokens: Vec<i64>,
    /// Tokens that do not come first.
    pub begin_suppress_tokens: Vec<i64>,
    /// Tokens that may come; all, if it is empty (vLLM's `allowed_token_ids`).
    pub allowed_token_ids: Vec<i64>,
    /// What the text must be.
    pub guide: Option<Arc<Guide>>,
    /// Taken from the logit of every new token that is there (OpenAI's).
    pub presence_penalty: f64,
    /// Taken from the logit of a new token as often as it is there (OpenAI's).
    pub frequency_penalty: f64,
}

/// A rule with its name: what it does after a text of which a guide leaves this, if there is one.
type Rule = (&'static str, fn(&LogitsProcessors, &mut Changes, &Seen, Option<&Legal>));

/// In transformers' order, and then vLLM's rules.
const RULES: [Rule; 14] = [
    ("sequence_bias", |rules, changes, seen, _| {
        for (sequence, by) in &rules.sequence_bias {
            if let Some(last) = completes(sequence, seen.tokens()) {
                changes.add(last, Change { plus: *by, ..Change::NONE });
            }
        }
    }),
    ("encoder_repetition_penalty", |rules, changes, seen, _| {
        if let Some(by) = rules.encoder_repetition_penalty.filter(|by| *by != 1.0) {
            let more = Change { times: 1.0 / by, ..Change::NONE };
            seen.encoder_once().iter().for_each(|token| changes.add(*token, more));
        }
    }),
    ("frequency_penalty and presence_penalty", |rules, changes, seen, _| {
        let (often, there) = (rules.frequency_penalty, rules.presence_penalty);
        if often != 0.0 || there != 0.0 {
            let less = |count| Change { less: often * count as f64 + there, ..Change::NONE };
            seen.counted().for_each(|(token, count)| changes.add(token, less(count)));
        }
    }),
    ("no_repeat_ngram_size", |rules, changes, seen, _| {
        changes.forbid(&repeated(rules.no_repeat_ngram_size, seen.tokens(), seen.tokens()));
    }),
    ("encoder_no_repeat_ngram_size", |rules, changes, seen, _| {
        changes.forbid(&repeated(rules.encoder_no_repeat_ngram_size, seen.encoder(), seen.tokens()));
    }),
    ("bad_words_ids", |rules, changes, seen, _| {
        let is_stop = |word: &[i64]| matches!(word, [one] if seen.stop_tokens().contains(one));
        let bad = rules.bad_words_ids.iter().filter(|word| !is_stop(word));
        changes.forbid(&bad.filter_map(|word| completes(word, seen.tokens())).collect::<Vec<_>>());
    }),
    ("min_length", |rules, changes, seen, legal| {
        // A guide's text that can only end ends.
        if seen.tokens().len() < rules.min_length && legal.is_none_or(|legal| !legal.ends) {
            changes.forbid(seen.stop_tokens());
        }
    }),
    ("min_new_tokens", |rules, changes, seen, legal| {
        if seen.new_tokens() < rules.min_new_tokens && legal.is_none_or(|legal| !legal.ends) {
            changes.forbid(seen.stop_tokens());
        }
    }),
    ("forced_bos_token_id", |rules, changes, seen, legal| {
        if let Some(token) = rules.forced_bos_token_id.filter(|_| seen.tokens().len() == 1) {
            force(changes, &[token], legal);
        }
    }),
    ("forced_eos_token_id", |rules, changes, seen, legal| {
        if !rules.forced_eos_token_id.is_empty() && seen.is_last() {
            force(changes, &rules.forced_eos_token_id, legal);
        }
    }),
    ("exponential_decay_length_penalty", |rules, changes, seen, _| {
        let decay = rules.exponential_decay_length_penalty;
        if let Some((start, factor)) = decay.filter(|(start, _)| seen.new_tokens() > *start) {
            // So much that the token comes, and the logit is a number.
            let grown = (factor.powf((seen.new_tokens() - start) as f64) - 1.0).min(1e30);
            seen.stop_tokens().iter().for_each(|token| changes.add(*token, Change { grown, ..Change::NONE }));
        }
    }),
    ("suppress_tokens and begin_suppress_tokens", |rules, changes, seen, _| {
        changes.forbid(&rules.suppress_tokens);
        // A forced first token is not the first that is chosen.
        let is_forced = seen.tokens().len() - seen.new_tokens() <= 1 && rules.forced_bos_token_id.is_some();
        if seen.new_tokens() == usize::from(is_forced) {
            changes.forbid(&rules.begin_suppress_tokens);
        }
    }),
    ("allowed_token_ids", |rules, changes, _, _| {
        if !rules.allowed_token_ids.is_empty() {
            changes.keep(changes.set(&rules.allowed_token_ids));
        }
    }),
    ("response_format", |_, changes, _, legal| legal.into_iter().for_each(|legal| changes.keep(legal.tokens.clone()))),
];

/// What a guide leaves.
struct Legal {
    /// Those that end the text come where it may end, and nowhere else.
    tokens: TokenSet,
    /// Nothing but the end may follow.
    ends: bool,
}

impl LogitsProcessors {
    /// The same with so many new tokens at least, if that is said: then `min_length` does not count, as in transformers.
    pub fn with_min_new_tokens(self, least: Option<usize>) -> Self {
        match least {
            Some(min_new_tokens) => Self { min_length: 0, min_new_tokens, ..self },
            None => self,
        }
    }

    /// What all rules and a repetition penalty (1 changes nothing) do to the `vocabulary` logits after this text.
    pub fn changes(&self, seen: &Seen, repetition_penalty: f64, vocabulary: usize) -> Changes {
        let (mut changes, legal) = (Changes::of(vocabulary), self.legal(seen, vocabulary));
        if repetition_penalty != 1.0 {
            let change = Change { times: repetition_penalty, ..Change::NONE };
            seen.distinct().for_each(|token| changes.add(token, change));
        }
        RULES.iter().for_each(|(_, rule)| rule(self, &mut changes, seen, legal.as_ref()));
        changes
    }

    /// The names of the rules that forbid some of the `vocabulary` tokens after this text.
    pub fn forbidding(&self, seen: &Seen, vocabulary: usize) -> Vec<&'static str> {
        let legal = self.legal(seen, vocabulary);
        let forbids = |rule: &&Rule| {
            let (mut changes, mut logits) = (Changes::of(vocabulary), vec![0.0; vocabulary]);
            rule.1(self, &mut changes, seen, legal.as_ref());
            changes.apply(&mut logits);
            logits.contains(&changes::NEVER)
        };
        RULES.iter().filter(forbids).map(|(name, _)| *name).collect()
    }

    fn legal(&self, seen: &Seen, vocabulary: usize) -> Option<Legal> {
        let (tokens, may_end) = self.guide.as_ref()?.next(seen.written());
        let mut tokens = TokenSet::clone(&tokens);
        let known = |token: &i64| usize::try_from(*token).ok().filter(|token| *token < vocabulary);
        let stop_tokens = || seen.stop_tokens().iter().filter_map(known);
        stop_tokens().for_each(|token| tokens.remove(token));
        let ends = may_end && tokens.is_empty();
        if may_end {
            stop_tokens().for_each(|token| tokens.insert(token as u32));
        }
        Some(Legal { tokens, ends })
    }
}

/// The last token of a sequence, if the text ends with all before it.
fn completes(sequence: &[i64], tokens: &[i64]) -> Option<i64> {
    let (last, before) = sequence.split_last()?;
    tokens.ends_with(before).then_some(*last)
}

/// The tokens that would end a sequence of `size` tokens which `of` has already.
fn repeated(size: usize, of: &[i64], tokens: &[i64]) -> Vec<i64> {
    if size == 0 {
        return Vec::new();
    }
    of.windows(size).filter_map(|window| completes(window, tokens)).collect()
}

/// Only these come, if a guide takes any of them.
fn force(changes: &mut Changes, tokens: &[i64], legal: Option<&Legal>) {
    let tokens = changes.set(tokens);
    if legal.is_none_or(|legal| tokens.iter().any(|token| legal.tokens.contains(token as usize))) {
        changes.force(tokens);
    }
}
