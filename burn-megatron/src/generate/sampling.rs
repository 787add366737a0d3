//! The choice of the next token from the model's logits, in transformers' order: temperature, top-k, top-p, draw
//! (`transformers/generation/logits_process.py`).

use super::GenerateError;

/// How the next token is chosen.
///
/// ```
/// use burn_megatron::prelude::*;
///
/// let logits = [0.1, 2.0, 1.9, -3.0];
/// assert_eq!(Sampling::greedy().choose(&logits, 0), 1);
/// // Draws one of the two likeliest tokens.
/// let nucleus = Sampling { temperature: 1.0, top_k: None, top_p: Some(0.8), seed: 7 };
/// assert!((0..100).all(|index| [1, 2].contains(&nucleus.choose(&logits, index))));
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
    /// Seed of the draws; the same seed gives the same text in every layout.
    pub seed: u64,
}

impl Default for Sampling {
    /// Temperature 0.8 among the 50 likeliest tokens.
    fn default() -> Self {
        Self { temperature: 0.8, top_k: Some(50), top_p: None, seed: 1 }
    }
}

impl Sampling {
    /// Always the likeliest token.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, top_k: None, top_p: None, seed: 0 }
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
        match self.top_p {
            Some(p) if !(p > 0.0 && p <= 1.0) => refuse("top-p", p, "above 0 and at most 1"),
            _ => Ok(()),
        }
    }

    /// The token chosen as new token number `index`.
    pub fn choose(&self, logits: &[f64], index: u64) -> usize {
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
        draw(&candidates, weight, uniform(self.seed, index))
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    /// Logits of given probabilities.
    fn logits(probabilities: &[f64]) -> Vec<f64> {
        probabilities.iter().map(|p| p.ln() + 3.0).collect()
    }

    fn top_k(probabilities: &[f64], k: usize) -> Vec<usize> {
        let mut candidates = (0..probabilities.len()).collect();
        keep_top_k(&mut candidates, probabilities, k);
        candidates
    }

    fn top_p(probabilities: &[f64], p: f64) -> Vec<usize> {
        let mut candidates = (0..probabilities.len()).collect();
        keep_top_p(&mut candidates, |token| probabilities[token], p);
        candidates
    }

    /// How often each token comes in 20 000 draws.
    fn shares(sampling: &Sampling, logits: &[f64]) -> Vec<f64> {
        let mut shares = vec![0.0; logits.len()];
        for index in 0..20_000 {
            shares[sampling.choose(logits, index)] += 1.0 / 20_000.0;
        }
        shares
    }

    fn assert_shares(found: &[f64], expected: &[f64]) {
        let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(worst < 0.012, "{found:?} instead of {expected:?}");
        assert!(found.iter().zip(expected).all(|(a, b)| *b > 0.0 || *a == 0.0), "{found:?} instead of {expected:?}");
    }

    #[test]
    fn greedy_takes_the_first_of_the_likeliest() {
        assert_eq!(Sampling::greedy().choose(&[0.0, 2.0, 2.0, -30.0], 5), 1);
        assert_eq!(Sampling::greedy().choose(&[f64::NEG_INFINITY, -4.0], 5), 1);
    }

    #[test]
    fn top_k_keeps_ties_with_the_last() {
        assert_eq!(top_k(&[0.1, 0.4, 0.2, 0.3], 2), [1, 3]);
        assert_eq!(top_k(&[0.2, 0.4, 0.2, 0.2], 2), [0, 1, 2, 3]);
        assert_eq!(top_k(&[0.1, 0.4, 0.2, 0.3], 1), [1]);
        assert_eq!(top_k(&[0.1, 0.4, 0.2, 0.3], 9), [0, 1, 2, 3]);
    }

    /// What transformers' `TopPLogitsWarper` keeps: its own test (`test_top_p_dist_warper`) keeps 0.5 and 0.3 of
    /// 0.3, 0.1, 0.1, 0.5 at 0.8, and all but the last two of 0.15, 0.3, 0.3, 0.25 at 0.7 together with the crossing
    /// one.
    #[test]
    fn top_p_keeps_the_smallest_set_that_reaches_the_share() {
        assert_eq!(top_p(&[0.3, 0.1, 0.1, 0.5], 0.79), [0, 3]);
        assert_eq!(top_p(&[0.3, 0.1, 0.1, 0.5], 0.81), [0, 1, 3]);
        assert_eq!(top_p(&[0.15, 0.3, 0.3, 0.25], 0.7), [1, 2, 3]);
        assert_eq!(top_p(&[0.25, 0.25, 0.25, 0.25], 0.5), [0, 1]);
        assert_eq!(top_p(&[0.25, 0.25, 0.25, 0.25], 0.51), [0, 1, 2]);
        assert_eq!(top_p(&[0.1, 0.9], 1e-9), [1]);
    }

    #[test]
    fn draws_follow_the_distribution() {
        let logits = logits(&[0.5, 0.3, 0.15, 0.05]);
        let plain = Sampling { temperature: 1.0, top_k: None, top_p: None, seed: 7 };
        assert_shares(&shares(&plain, &logits), &[0.5, 0.3, 0.15, 0.05]);
        let two = Sampling { top_k: Some(2), ..plain };
        assert_shares(&shares(&two, &logits), &[0.625, 0.375, 0.0, 0.0]);
        let most = Sampling { top_p: Some(0.9), ..plain };
        assert_shares(&shares(&most, &logits), &[0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0]);
        // Temperature 0.5 squares the probabilities.
        let cold = Sampling { temperature: 0.5, ..plain };
        assert_shares(&shares(&cold, &logits), &[0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]);
    }

    /// The temperature comes before top-p: squared, the first of 0.5, 0.3, 0.2 has 0.66 of the whole.
    #[test]
    fn top_p_sees_probabilities_after_temperature_and_top_k() {
        let logits = logits(&[0.5, 0.3, 0.2]);
        let cold = Sampling { temperature: 0.5, top_k: None, top_p: Some(0.6), seed: 3 };
        assert_shares(&shares(&cold, &logits), &[1.0, 0.0, 0.0]);
        // Of the two that top-k leaves, the first has 0.625.
        let both = Sampling { temperature: 1.0, top_k: Some(2), top_p: Some(0.6), seed: 3 };
        assert_shares(&shares(&both, &logits), &[1.0, 0.0, 0.0]);
    }

    #[test]
    fn values_out_of_range_are_named() {
        let refuse = |sampling: Sampling| sampling.check().unwrap_err().to_string();
        let plain = Sampling::default();
        assert!(refuse(Sampling { temperature: -1.0, ..plain }).starts_with("temperature -1 is not 0"));
        assert!(refuse(Sampling { temperature: f64::NAN, ..plain }).starts_with("temperature NaN"));
        assert_eq!(refuse(Sampling { top_k: Some(0), ..plain }), "top-k 0 is not at least 1");
        assert_eq!(refuse(Sampling { top_p: Some(1.5), ..plain }), "top-p 1.5 is not above 0 and at most 1");
        assert_eq!(refuse(Sampling { top_p: Some(0.0), ..plain }), "top-p 0 is not above 0 and at most 1");
        assert_eq!(Sampling { top_p: Some(1.0), ..plain }.check(), Ok(()));
    }
}
