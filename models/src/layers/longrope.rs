//! LongRoPE (Ding et al. 2024, <https://arxiv.org/abs/2402.13753>): every pair of features is stretched by a factor of its
//! own, one for sequences within the original context and another one for longer sequences.
//!
//! fp32 in the order of Hugging Face transformers (`modeling_rope_utils.py`, `_compute_longrope_parameters`), as all of
//! [`rope`](super::rope).

use serde::{Deserialize, Serialize};

/// Most pairs of features that have factors.
const MOST_PAIRS: usize = 128;

/// LongRoPE's scaling of the rotary frequencies. Names and defaults are Hugging Face's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rope_type", rename = "longrope", deny_unknown_fields)]
pub struct LongRopeScaling {
    /// Context length of the model before stretching.
    pub original_max_position_embeddings: usize,
    /// How many times longer the context has become; attention is sharpened for it.
    pub factor: f64,
    /// Waves of sequences of at most the original context are this many times longer, pair by pair.
    pub short_factor: PairFactors,
    /// Waves of longer sequences are.
    pub long_factor: PairFactors,
    /// Factor of cosines and sines, instead of the one that follows from `factor`.
    #[serde(default)]
    pub attention_factor: Option<f64>,
}

/// A factor for each pair of rotated features, at most 128; in files a list of numbers.
///
/// Configurations are copied, so the numbers are in the value itself.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Vec<f64>", into = "Vec<f64>")]
pub struct PairFactors {
    values: [f64; MOST_PAIRS],
    pairs: usize,
}

impl PairFactors {
    /// The factors, in the order of the pairs.
    pub fn as_slice(&self) -> &[f64] {
        &self.values[..self.pairs]
    }
}

impl TryFrom<Vec<f64>> for PairFactors {
    type Error = String;

    fn try_from(factors: Vec<f64>) -> Result<Self, String> {
        let pairs = factors.len();
        let mut values = [0.0; MOST_PAIRS];
        let Some(room) = values.get_mut(..pairs) else {
            return Err(format!("{pairs} factors of rotary frequencies; at most {MOST_PAIRS}"));
        };
        room.copy_from_slice(&factors);
        Ok(Self { values, pairs })
    }
}

impl From<PairFactors> for Vec<f64> {
    fn from(factors: PairFactors) -> Self {
        factors.as_slice().to_vec()
    }
}

impl std::fmt::Debug for PairFactors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.as_slice().fmt(f)
    }
}

impl LongRopeScaling {
    /// Frequencies from the waves of the base, for sequences longer than the original context or for others.
    pub(super) fn frequencies(&self, waves: &[f32], long: bool) -> Vec<f32> {
        let factors = if long { &self.long_factor } else { &self.short_factor };
        waves.iter().zip(factors.as_slice()).map(|(wave, factor)| (*factor as f32 * wave).recip()).collect()
    }

    /// What cosines and sines are multiplied with, for sequences of any length.
    pub(super) fn attention_factor(&self) -> f64 {
        let original = self.original_max_position_embeddings as f64;
        let stretched = || if self.factor > 1.0 { (1.0 + self.factor.ln() / original.ln()).sqrt() } else { 1.0 };
        self.attention_factor.unwrap_or_else(stretched)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scaling() -> LongRopeScaling {
        let factors = |factors: &[f64]| PairFactors::try_from(factors.to_vec()).unwrap();
        LongRopeScaling {
            original_max_position_embeddings: 4096,
            factor: 32.0,
            short_factor: factors(&[1.0, 1.5]),
            long_factor: factors(&[2.0, 4.0]),
            attention_factor: None,
        }
    }

    #[test]
    fn each_pair_has_its_own_factor() {
        assert_eq!(scaling().frequencies(&[1.0, 8.0], false), [1.0, 1.0 / 12.0]);
        assert_eq!(scaling().frequencies(&[1.0, 8.0], true), [0.5, 1.0 / 32.0]);
    }

    /// Phi-3-mini-128k: √(1 + ln 32 / ln 4096), which is √(17/12).
    #[test]
    fn attention_is_sharpened_by_the_stretch() {
        assert!((scaling().attention_factor() - (17.0f64 / 12.0).sqrt()).abs() < 1e-15);
        assert_eq!(LongRopeScaling { factor: 1.0, ..scaling() }.attention_factor(), 1.0);
        assert_eq!(LongRopeScaling { attention_factor: Some(1.25), ..scaling() }.attention_factor(), 1.25);
    }

    #[test]
    fn files_have_lists_of_factors() {
        let written = serde_json::to_string(&scaling()).unwrap();
        assert!(written.contains(r#""short_factor":[1.0,1.5]"#), "{written}");
        let error = serde_json::from_value::<PairFactors>(serde_json::json!(vec![1.0; 129])).unwrap_err().to_string();
        assert!(error.contains("129 factors of rotary frequencies; at most 128"), "{error}");
    }
}
