//! The choice of the next token from the model's logits, in transformers' order: repetition penalty, temperature, top-k,
//! top-p, min-p, draw (`transformers/generation/logits_process.py`).

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::ops::RangeInclusive;

use super::GenerateError;

/// How the next token is chosen.
///
/// ```
/// use burn_megatron::prelude::*;
///
/// let (logits, tokens) = ([0.1, 2.0, 1.9, -3.0], [3, 1, 0]);
/// assert_eq!(Sampling::greedy().choose(&logits, &tokens, 0), 1);
/// // Token 1 was there before, token 2 was not.
/// let penalised = Sampling { repetition_penalty: 1.1, ..Sampling::greedy() };
/// assert_eq!(penalised.choose(&logits, &tokens, 0), 2);
/// // Draws one of the two likeliest tokens.
/// let nucleus = Sampling { temperature: 1.0, top_p: Some(0.8), seed: 7, ..Sampling::greedy() };
/// assert!((0..100).all(|index| [1, 2].contains(&nucleus.choose(&logits, &tokens, index))));
/// assert!(Sampling { top_p: Some(1.5), ..nucleus }.check().is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the likeliest token, 1 draws from the model's distribution, more flattens it.
    pub temperature: f64,
    /// Draw only among so many likeliest tokens and those as likely as the last of them; `None` among all.
    pub top_k: Option<usize>,
    /// Draw only among the likeliest tokens that together reach this probability, the one that crosses it included;
    /// `None` among all.
    pub top_p: Option<f64>,
    /// Draw only among the tokens that are at least so many times as likely as the likeliest (Nguyen et al., 2024); `None`
    /// among all.
    pub min_p: Option<f64>,
    /// Positive logits of the tokens in prompt and text are divided by this, negative ones multiplied, before everything else
    /// (CTRL, Keskar et al., 2019): above 1 they come less often; 1 changes nothing.
    pub repetition_penalty: f64,
    /// Seed of the draws; the same seed gives the same text in every layout.
    pub seed: u64,
}

impl Default for Sampling {
    /// Temperature 0.8 among the 50 likeliest tokens.
    fn default() -> Self {
        Self { temperature: 0.8, top_k: Some(50), seed: 1, ..Self::greedy() }
    }
}

impl Sampling {
    /// Always the likeliest token.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, top_k: None, top_p: None, min_p: None, repetition_penalty: 1.0, seed: 0 }
    }

    /// Whether the options are in their ranges.
    ///
    /// # Errors
    /// Names the one that is not.
    pub fn check(&self) -> Result<(), GenerateError> {
        let refuse = |option, value, range| Err(GenerateError::Sampling { option, value, range });
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return refuse("temperature", self.temperature, "0 (always the likeliest token) or a positive number");
        }
        if self.top_k == Some(0) {
            return refuse("top-k", 0.0, "at least 1");
        }
        if let Some(p) = self.top_p.filter(|p| !(*p > 0.0 && *p <= 1.0)) {
            return refuse("top-p", p, "above 0 and at most 1");
        }
        if let Some(p) = self.min_p.filter(|p| !(0.0..=1.0).contains(p)) {
            return refuse("min-p", p, "0 to 1");
        }
        match PENALTIES.contains(&self.repetition_penalty) {
            true => Ok(()),
            false => refuse("repetition-penalty", self.repetition_penalty, "0.01 to 100 (1 changes nothing)"),
        }
    }

    /// Whether the choice is the likeliest token, whatever there was before.
    pub(super) fn is_argmax(&self) -> bool {
        self.temperature == 0.0 && !self.penalises()
    }

    /// Whether the tokens before matter.
    pub(super) fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0
    }

    /// The token chosen as new token number `index`, after the `tokens` of prompt and text.
    pub fn choose(&self, logits: &[f64], tokens: &[i64], index: u64) -> usize {
        let logits = &*self.penalised(logits, tokens);
        if self.temperature == 0.0 {
            return likeliest(logits);
        }
        let highest = logits[likeliest(logits)];
        let weight = |token: usize| ((logits[token] - highest) / self.temperature).exp();
        let mut candidates: Vec<usize> = (0..logits.len()).collect();
        if let Some(k) = self.top_k {
            keep_top_k(&mut candidates, logits, k);
        }
        if let Some(p) = self.top_p.filter(|p| *p < 1.0) {
            keep_top_p(&mut candidates, weight, p);
        }
        if let Some(p) = self.min_p {
            // The likeliest has weight 1.
            candidates.retain(|&token| weight(token) >= p);
        }
        draw(&candidates, weight, uniform(self.seed, index))
    }

    fn penalised<'a>(&self, logits: &'a [f64], tokens: &[i64]) -> Cow<'a, [f64]> {
        let mut all = Cow::Borrowed(logits);
        if self.penalises() {
            // However often a token was there.
            for token in tokens.iter().map(|token| *token as usize).filter(|token| *token < logits.len()) {
                let (logit, by) = (logits[token], self.repetition_penalty);
                all.to_mut()[token] = if logit < 0.0 { logit * by } else { logit / by };
            }
        }
        all
    }
}

/// Penalties that leave logits finite.
pub(crate) const PENALTIES: RangeInclusive<f64> = 0.01..=100.0;

/// The first of the highest logits.
fn likeliest(logits: &[f64]) -> usize {
    (1..logits.len()).fold(0, |best, token| if logits[token] > logits[best] { token } else { best })
}

/// Keeps the tokens that are at least as likely as the `k`-th.
fn keep_top_k(candidates: &mut Vec<usize>, logits: &[f64], k: usize) {
    if k < candidates.len() {
        let mut order = candidates.clone();
        let (_, last, _) = order.select_nth_unstable_by(k - 1, |&a, &b| logits[b].total_cmp(&logits[a]));
        let threshold = logits[*last];
        candidates.retain(|&token| logits[token] >= threshold);
    }
}

/// Keeps the likeliest tokens as long as those before them have not reached the share `p` of the whole weight; of
/// equally likely ones the first. Always keeps one.
fn keep_top_p(candidates: &mut Vec<usize>, weight: impl Fn(usize) -> f64, p: f64) {
    let enough = p * candidates.iter().map(|&token| weight(token)).sum::<f64>();
    candidates.sort_by(|&a, &b| weight(b).total_cmp(&weight(a)));
    let mut before = 0.0;
    let end = candidates.iter().position(|&token| {
        let reached = before >= enough;
        before += weight(token);
        reached
    });
    candidates.truncate(end.unwrap_or(candidates.len()).max(1));
    // The draw goes through the tokens by number: rounding that swaps two of nearly the same weight moves it
    // little.
    candidates.sort_unstable();
}

/// The token under the point `at`, from `[0, 1)`, when each takes a share of the line as long as its weight.
fn draw(candidates: &[usize], weight: impl Fn(usize) -> f64, at: f64) -> usize {
    let mut left = at * candidates.iter().map(|&token| weight(token)).sum::<f64>();
    for &token in candidates {
        left -= weight(token);
        if left < 0.0 {
            return token;
        }
    }
    // Rounding: the last one that can be drawn at all.
    candidates.iter().rev().copied().find(|&token| weight(token) > 0.0).unwrap_or(candidates[0])
}

/// A number in `[0, 1)` for an index: SplitMix64 (Steele, Lea and Flood, 2014).
fn uniform(seed: u64, index: u64) -> f64 {
    let mut z = seed.wrapping_add((index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}
