//! The choice of the next token from the model's logits, in transformers' order: repetition penalty, temperature, top-h,
//! top-k, top-p, min-p, typical-p, cutoffs, draw (`transformers/generation/logits_process.py`).

mod filters;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use backend_dist::ops::draw::Draw;

use self::filters::Candidates;
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
    /// Draw only among the likeliest tokens whose terms of the entropy stay within this share of it; of the 100 likeliest;
    /// `None` among all.
    pub top_h: Option<f64>,
    /// Draw only among the tokens that together reach this probability, those first whose surprise is nearest to the entropy
    /// (Meister et al., 2022); `None` among all.
    pub typical_p: Option<f64>,
    /// Draw only among the tokens that are at least so likely, and the likeliest (Hewitt et al., 2022); 0 among all.
    pub epsilon_cutoff: f64,
    /// The same with the smaller of this and its root over e to the power of the entropy; 0 among all.
    pub eta_cutoff: f64,
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
        Self {
            temperature: 0.0,
            top_k: None,
            top_p: None,
            min_p: None,
            top_h: None,
            typical_p: None,
            epsilon_cutoff: 0.0,
            eta_cutoff: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
        }
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
        for (option, share) in [("top-p", self.top_p), ("top-h", self.top_h), ("typical-p", self.typical_p)] {
            if let Some(share) = share.filter(|share| !(*share > 0.0 && *share <= 1.0)) {
                return refuse(option, share, "above 0 and at most 1");
            }
        }
        for (option, cutoff) in [("epsilon-cutoff", self.epsilon_cutoff), ("eta-cutoff", self.eta_cutoff)] {
            if !(0.0..1.0).contains(&cutoff) {
                return refuse(option, cutoff, "at least 0 and below 1");
            }
        }
        if let Some(p) = self.min_p.filter(|p| !(0.0..=1.0).contains(p)) {
            return refuse("min-p", p, "0 to 1");
        }
        match PENALTIES.contains(&self.repetition_penalty) {
            true => Ok(()),
            false => refuse("repetition-penalty", self.repetition_penalty, "0.01 to 100 (1 changes nothing)"),
        }
    }

    /// New token number `index` as a draw from logits with all changes, if it is one that
    /// [`draw`](backend_dist::ops::draw::draw) knows.
    pub(super) fn draw(&self, index: u64) -> Option<Draw> {
        let Self { temperature, top_k, top_p, min_p, top_h, typical_p, epsilon_cutoff, eta_cutoff, .. } = *self;
        let filters = temperature > 0.0
            && (top_h.is_some() || typical_p.is_some_and(|p| p < 1.0) || epsilon_cutoff > 0.0 || eta_cutoff > 0.0);
        let at = uniform(self.seed, index);
        (!filters).then_some(Draw { temperature, top_k, top_p, min_p, at })
    }

    /// Whether the tokens before matter.
    pub(super) fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0
    }

    /// The token chosen as new token number `index`, after the `tokens` of prompt and text; the first one if all logits are -∞.
    pub fn choose(&self, logits: &[f64], tokens: &[i64], index: u64) -> usize {
        if !self.penalises() {
            return self.pick(logits, index).unwrap_or_default();
        }
        let mut logits = logits.to_vec();
        // However often a token was there.
        let seen: BTreeSet<i64> = tokens.iter().copied().collect();
        self.penalise(&mut logits, seen.into_iter());
        self.pick(&logits, index).unwrap_or_default()
    }

    /// `seen` has each token once.
    pub(super) fn penalise(&self, logits: &mut [f64], seen: impl Iterator<Item = i64>) {
        let by = self.repetition_penalty;
        for token in seen {
            if let Some(logit) = usize::try_from(token).ok().and_then(|token| logits.get_mut(token)) {
                *logit = if *logit < 0.0 { *logit * by } else { *logit / by };
            }
        }
    }

    /// From logits with all penalties, of which those of tokens that do not come are -∞; `None` if no token comes.
    pub(super) fn pick(&self, logits: &[f64], index: u64) -> Option<usize> {
        let best = likeliest(logits);
        if logits[best] == f64::NEG_INFINITY {
            return None;
        }
        if self.temperature == 0.0 {
            return Some(best);
        }
        let mut left = Candidates::all(logits, logits[best], self.temperature);
        if let Some(share) = self.top_h {
            left.keep_top_h(share);
        }
        if let Some(k) = self.top_k {
            left.keep_top_k(k);
        }
        if let Some(p) = self.top_p.filter(|p| *p < 1.0) {
            left.keep_top_p(p);
        }
        if let Some(p) = self.min_p {
            left.keep_min_p(p);
        }
        if let Some(p) = self.typical_p.filter(|p| *p < 1.0) {
            left.keep_typical(p);
        }
        if self.epsilon_cutoff > 0.0 {
            left.keep_probability(self.epsilon_cutoff);
        }
        if self.eta_cutoff > 0.0 {
            left.keep_probability(self.eta_cutoff.min(self.eta_cutoff.sqrt() * (-left.entropy()).exp()));
        }
        Some(left.draw(uniform(self.seed, index)))
    }
}

/// Penalties that leave logits finite.
pub(crate) const PENALTIES: RangeInclusive<f64> = 0.01..=100.0;

/// The first of the highest logits.
fn likeliest(logits: &[f64]) -> usize {
    (1..logits.len()).fold(0, |best, token| if logits[token] > logits[best] { token } else { best })
}

/// A number in `[0, 1)` for an index: SplitMix64 (Steele, Lea and Flood, 2014).
fn uniform(seed: u64, index: u64) -> f64 {
    let mut z = seed.wrapping_add((index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}
