//! What changes a model's logits before a token is chosen: rules of transformers' (`generation/logits_process.py`), under
//! its names, in its order, and the penalties of OpenAI's.

mod check;
mod seen;
#[cfg(test)]
mod tests;

use std::sync::Arc;

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
/// rules.restrict(&mut logits, &Seen::new(&[0, 1, 0], &[0, 1, 0], &[], 5));
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

/// A rule that can forbid tokens, with its name: its change of the logits, and what the guide leaves, if there is one.
type Rule = (&'static str, fn(&LogitsProcessors, &mut [f64], &Seen, Option<&Legal>));

/// What comes behind the repetition penalty, in transformers' order, and then vLLM's rules.
const RULES: [Rule; 12] = [
    ("frequency_penalty and presence_penalty", |rules, logits, seen, _| {
        let (often, there) = (rules.frequency_penalty, rules.presence_penalty);
        if often != 0.0 || there != 0.0 {
            seen.counted().for_each(|(token, count)| at(logits, token, |logit| logit - often * count as f64 - there));
        }
    }),
    ("no_repeat_ngram_size", |rules, logits, seen, _| {
        forbid(logits, &repeated(rules.no_repeat_ngram_size, seen.tokens(), seen.tokens()));
    }),
    ("encoder_no_repeat_ngram_size", |rules, logits, seen, _| {
        forbid(logits, &repeated(rules.encoder_no_repeat_ngram_size, seen.encoder(), seen.tokens()));
    }),
    ("bad_words_ids", |rules, logits, seen, _| {
        let is_stop = |word: &[i64]| matches!(word, [one] if seen.stop_tokens().contains(one));
        let bad = rules.bad_words_ids.iter().filter(|word| !is_stop(word));
        forbid(logits, &bad.filter_map(|word| completes(word, seen.tokens())).collect::<Vec<_>>());
    }),
    ("min_length", |rules, logits, seen, legal| {
        // A guide's text that can only end ends.
        if seen.tokens().len() < rules.min_length && legal.is_none_or(|legal| !legal.ends) {
            forbid(logits, seen.stop_tokens());
        }
    }),
    ("min_new_tokens", |rules, logits, seen, legal| {
        if seen.new_tokens() < rules.min_new_tokens && legal.is_none_or(|legal| !legal.ends) {
            forbid(logits, seen.stop_tokens());
        }
    }),
    ("forced_bos_token_id", |rules, logits, seen, legal| {
        if let Some(token) = rules.forced_bos_token_id.filter(|_| seen.tokens().len() == 1) {
            force(logits, &[token], legal);
        }
    }),
    ("forced_eos_token_id", |rules, logits, seen, legal| {
        if !rules.forced_eos_token_id.is_empty() && seen.is_last() {
            force(logits, &rules.forced_eos_token_id, legal);
        }
    }),
    ("exponential_decay_length_penalty", |rules, logits, seen, _| {
        let decay = rules.exponential_decay_length_penalty;
        if let Some((start, factor)) = decay.filter(|(start, _)| seen.new_tokens() > *start) {
            // So much that the token comes, and the logit is a number.
            let grown = (factor.powf((seen.new_tokens() - start) as f64) - 1.0).min(1e100);
            let grow = |logit: f64| if logit.is_finite() { logit + logit.abs() * grown } else { logit };
            seen.stop_tokens().iter().for_each(|token| at(logits, *token, grow));
        }
    }),
    ("suppress_tokens and begin_suppress_tokens", |rules, logits, seen, _| {
        forbid(logits, &rules.suppress_tokens);
        // A forced first token is not the first that is chosen.
        let is_forced = seen.tokens().len() - seen.new_tokens() <= 1 && rules.forced_bos_token_id.is_some();
        if seen.new_tokens() == usize::from(is_forced) {
            forbid(logits, &rules.begin_suppress_tokens);
        }
    }),
    ("allowed_token_ids", |rules, logits, _, _| {
        if !rules.allowed_token_ids.is_empty() {
            keep(logits, &rules.allowed_token_ids);
        }
    }),
    ("response_format", |_, logits, _, legal| legal.into_iter().for_each(|legal| legal.keep(logits))),
];

/// What a guide leaves.
struct Legal {
    tokens: Arc<TokenSet>,
    /// Those that end the text: they come where it may end, and nowhere else.
    stop_tokens: Vec<i64>,
    may_end: bool,
    /// Nothing but the end may follow.
    ends: bool,
}

impl Legal {
    fn has(&self, token: i64) -> bool {
        match self.stop_tokens.contains(&token) {
            true => self.may_end,
            false => usize::try_from(token).is_ok_and(|token| self.tokens.contains(token)),
        }
    }

    fn keep(&self, logits: &mut [f64]) {
        let all = logits.iter_mut().enumerate();
        all.filter(|(token, _)| !self.has(*token as i64)).for_each(|(_, logit)| *logit = NEVER);
    }
}

impl LogitsProcessors {
    /// The same with so many new tokens at least, if that is said: then `min_length` does not count, as in transformers.
    pub fn with_min_new_tokens(self, least: Option<usize>) -> Self {
        match least {
            Some(min_new_tokens) => Self { min_length: 0, min_new_tokens, ..self },
            None => self,
        }
    }

    /// What comes before the repetition penalty.
    pub fn bias(&self, logits: &mut [f64], seen: &Seen) {
        for (sequence, by) in &self.sequence_bias {
            if let Some(last) = completes(sequence, seen.tokens()) {
                at(logits, last, |logit| logit + by);
            }
        }
        if let Some(by) = self.encoder_repetition_penalty.filter(|by| *by != 1.0) {
            let more = |logit: f64| if logit < 0.0 { logit / by } else { logit * by };
            seen.encoder_once().iter().for_each(|token| at(logits, *token, more));
        }
    }

    /// What comes behind the repetition penalty.
    pub fn restrict(&self, logits: &mut [f64], seen: &Seen) {
        let legal = self.legal(seen);
        RULES.iter().for_each(|(_, rule)| rule(self, logits, seen, legal.as_ref()));
    }

    /// The names of the rules that forbid tokens after this text.
    pub fn forbidding(&self, logits: &[f64], seen: &Seen) -> Vec<&'static str> {
        let legal = self.legal(seen);
        let forbids = |rule: &&Rule| {
            let mut logits = logits.to_vec();
            rule.1(self, &mut logits, seen, legal.as_ref());
            logits.contains(&NEVER)
        };
        RULES.iter().filter(forbids).map(|(name, _)| *name).collect()
    }

    fn legal(&self, seen: &Seen) -> Option<Legal> {
        let guide = self.guide.as_ref()?;
        let ((tokens, may_end), stop_tokens) = (guide.next(seen.written()), seen.stop_tokens().to_vec());
        let ends = may_end && tokens.iter().all(|token| stop_tokens.contains(&token));
        Some(Legal { tokens, stop_tokens, may_end, ends })
    }
}

/// The logit of a token that does not come.
const NEVER: f64 = f64::NEG_INFINITY;

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

fn at(logits: &mut [f64], token: i64, change: impl Fn(f64) -> f64) {
    if let Some(logit) = usize::try_from(token).ok().and_then(|token| logits.get_mut(token)) {
        *logit = change(*logit);
    }
}

fn forbid(logits: &mut [f64], tokens: &[i64]) {
    tokens.iter().for_each(|token| at(logits, *token, |_| NEVER));
}

fn keep(logits: &mut [f64], tokens: &[i64]) {
    let logit = |token: &i64| Some((*token, *logits.get(usize::try_from(*token).ok()?)?));
    let kept: Vec<(i64, f64)> = tokens.iter().filter_map(logit).collect();
    logits.fill(NEVER);
    kept.into_iter().for_each(|(token, logit)| at(logits, token, |_| logit));
}

/// Only these, all as likely; a guide that takes none of them is stronger.
fn force(logits: &mut [f64], tokens: &[i64], legal: Option<&Legal>) {
    if legal.is_none_or(|legal| tokens.iter().any(|token| legal.has(*token))) {
        logits.fill(NEVER);
        tokens.iter().for_each(|token| at(logits, *token, |_| 0.0));
    }
}
