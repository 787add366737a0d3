//! YaRN (Peng et al. 2023, <https://arxiv.org/abs/2309.00071>): low frequencies are stretched, high ones kept, those
//! between go over, and attention is sharpened.
//!
//! fp32 in the order of Hugging Face transformers (`modeling_rope_utils.py`, `_compute_yarn_parameters`), as all of
//! [`rope`](super::rope).

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

/// YaRN's scaling of the rotary frequencies. Names and defaults are Hugging Face's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct YarnScaling {
    /// Low frequencies are divided by this.
    pub factor: f64,
    /// Context length of the model before stretching.
    pub original_max_position_embeddings: usize,
    /// Pairs that turn more often than this within the original context are left alone.
    #[serde(default = "beta_fast")]
    pub beta_fast: f64,
    /// Pairs that turn less often than this within the original context are stretched fully.
    #[serde(default = "beta_slow")]
    pub beta_slow: f64,
    /// Weight of the sharpening of the rotated features, relative to `mscale_all_dim`.
    #[serde(default)]
    pub mscale: Option<f64>,
    /// Weight of the sharpening of all features, which DeepSeek applies to the scores.
    #[serde(default)]
    pub mscale_all_dim: Option<f64>,
    /// Factor of cosines and sines, instead of the one that follows from the others.
    #[serde(default)]
    pub attention_factor: Option<f64>,
    /// The limits between kept and stretched pairs are rounded outwards to whole pairs.
    #[serde(default = "truncate")]
    pub truncate: bool,
}

fn beta_fast() -> f64 {
    32.0
}

fn beta_slow() -> f64 {
    1.0
}

fn truncate() -> bool {
    true
}

impl YarnScaling {
    /// A scaling by `factor` from a context of `original` positions, all else as transformers has it without other
    /// keys.
    pub fn new(factor: f64, original: usize) -> Self {
        Self {
            factor,
            original_max_position_embeddings: original,
            beta_fast: beta_fast(),
            beta_slow: beta_slow(),
            mscale: None,
            mscale_all_dim: None,
            attention_factor: None,
            truncate: truncate(),
        }
    }

    /// Factor of cosines and sines.
    pub fn attention_factor(&self) -> f64 {
        let derived = || match (self.mscale.filter(|m| *m != 0.0), self.mscale_all_dim.filter(|m| *m != 0.0)) {
            (Some(mscale), Some(all)) => sharpening(self.factor, mscale) / sharpening(self.factor, all),
            _ => sharpening(self.factor, 1.0),
        };
        self.attention_factor.unwrap_or_else(derived)
    }

    /// Factor of the scores in DeepSeek's attention (`modeling_deepseek_v3.py`, `DeepseekV3Attention.scaling`).
    pub fn score_factor(&self) -> f64 {
        self.mscale_all_dim.map_or(1.0, |all| sharpening(self.factor, all).powi(2))
    }

    /// The frequencies of `waves.len()` pairs with base `theta`, from their unscaled radians per turn, `theta^(2i/d)`.
    pub(super) fn frequencies(&self, waves: &[f32], theta: f64) -> Vec<f32> {
        let (low, high) = self.limits(2 * waves.len(), theta);
        let (low, span) = (low as f32, (if low == high { 0.001 } else { high - low }) as f32);
        let frequency = |(pair, wave): (usize, &f32)| {
            let (kept, stretched) = (wave.recip(), (self.factor as f32 * wave).recip());
            let share = 1.0 - ((pair as f32 - low) / span).clamp(0.0, 1.0);
            stretched * (1.0 - share) + kept * share
        };
        waves.iter().enumerate().map(frequency).collect()
    }

    /// The pairs between which frequencies go over from kept to stretched.
    fn limits(&self, head_dim: usize, theta: f64) -> (f64, f64) {
        let context = self.original_max_position_embeddings as f64;
        let pair = |turns: f64| head_dim as f64 * (context / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
        let (low, high) = (pair(self.beta_fast), pair(self.beta_slow));
        let (low, high) = if self.truncate { (low.floor(), high.ceil()) } else { (low, high) };
        (low.max(0.0), high.min(head_dim as f64 - 1.0))
    }
}

/// The paper's `√(1/t) = 0.1 ln(factor) + 1`, with a weight.
fn sharpening(factor: f64, weight: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// DeepSeek-V3's: 64 rotated features, base 10000, 4096 positions stretched by 40.
    fn deepseek() -> YarnScaling {
        YarnScaling { mscale: Some(1.0), mscale_all_dim: Some(1.0), ..YarnScaling::new(40.0, 4096) }
    }

    fn waves(pairs: usize) -> Vec<f32> {
        (0..pairs).map(|pair| 10_000f64.powf(pair as f64 / pairs as f64) as f32).collect()
    }

    /// By hand: `64 ln(4096 / 64π) / (2 ln 10000) = 10.47` and `64 ln(4096 / 2π) / (2 ln 10000) = 22.51`.
    #[test]
    fn deepseeks_pairs_go_over_between_10_and_23() {
        assert_eq!(deepseek().limits(64, 10_000.0), (10.0, 23.0));
        let (waves, frequencies) = (waves(32), deepseek().frequencies(&waves(32), 10_000.0));
        for pair in 0..32 {
            let stretched = f64::from(frequencies[pair]) * f64::from(waves[pair]);
            let share = ((pair as f64 - 10.0) / 13.0).clamp(0.0, 1.0);
            assert!((stretched - (1.0 - share + share / 40.0)).abs() < 1e-6, "pair {pair}: {stretched}");
        }
        assert_eq!(frequencies[10], waves[10].recip());
        assert_eq!(frequencies[23], (40.0 * waves[23]).recip());
    }

    /// `0.1 ln 40 + 1 = 1.36889`: with equal weights none is left for cosines, and the scores have its square.
    #[test]
    fn attention_is_sharpened_once() {
        assert_eq!(deepseek().attention_factor(), 1.0);
        assert!((deepseek().score_factor() - 1.368_887_945_411_394f64.powi(2)).abs() < 1e-12);
        let plain = YarnScaling::new(40.0, 4096);
        assert!((plain.attention_factor() - 1.368_887_945_411_394).abs() < 1e-12);
        assert_eq!(plain.score_factor(), 1.0);
        assert_eq!(YarnScaling { attention_factor: Some(0.5), ..plain }.attention_factor(), 0.5);
        assert_eq!(YarnScaling::new(1.0, 4096).attention_factor(), 1.0);
    }

    #[test]
    fn limits_are_inside_the_head() {
        let short = YarnScaling { truncate: false, ..YarnScaling::new(4.0, 8) };
        let (low, high) = short.limits(8, 10_000.0);
        assert!(low == 0.0 && high > 0.0 && high < 1.0, "{low} {high}");
        // All pairs turn too seldom or too often: the limits meet.
        let none = YarnScaling { beta_fast: 1e9, beta_slow: 1e9, ..YarnScaling::new(4.0, 8) };
        assert!(none.frequencies(&waves(4), 10_000.0).iter().all(|frequency| frequency.is_finite()));
    }
}
