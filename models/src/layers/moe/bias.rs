//! What moves the bias that balances experts without a loss (<https://arxiv.org/abs/2408.15664>, algorithm 1): the tokens
//! of the experts in a step.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// The tokens of the experts in the layers of a rank whose routers have a bias. Clones are the same counts.
#[derive(Clone, Debug, Default)]
pub struct BiasCounts(Arc<Mutex<BTreeMap<usize, ExpertTokens>>>);

/// The tokens of a layer's experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertTokens {
    /// The layer, counted over the whole model.
    pub layer: usize,
    /// Parameter id of the bias.
    pub param: u64,
    /// By how much it changes in a step.
    pub rate: f64,
    /// Copies of tokens that each expert has, without those that it had no room for.
    pub tokens: Vec<u64>,
}

impl BiasCounts {
    /// Adds copies of a rank's tokens.
    pub(super) fn add(&self, counts: ExpertTokens) {
        let mut layers = self.0.lock();
        match layers.get_mut(&counts.layer) {
            Some(before) => before.add(&counts),
            None => drop(layers.insert(counts.layer, counts)),
        }
    }

    /// The counts by layer; counting starts anew.
    pub fn take(&self) -> Vec<ExpertTokens> {
        std::mem::take(&mut *self.0.lock()).into_values().collect()
    }
}

impl ExpertTokens {
    /// Adds the tokens of another rank or pass.
    ///
    /// # Panics
    /// If the layer has another number of experts there.
    pub fn add(&mut self, other: &Self) {
        assert_eq!(self.tokens.len(), other.tokens.len(), "experts of layer {}", self.layer);
        self.tokens.iter_mut().zip(&other.tokens).for_each(|(sum, count)| *sum += count);
    }

    /// By expert, what is added to the bias: the rate for one with less tokens than the mean, its opposite for one with
    /// more.
    pub fn steps(&self) -> Vec<f64> {
        let (count, all) = (self.tokens.len() as u64, self.tokens.iter().sum::<u64>());
        // Without division, so that an expert that has the mean stays where it is.
        let step = |tokens: &u64| match (tokens * count).cmp(&all) {
            std::cmp::Ordering::Less => self.rate,
            std::cmp::Ordering::Equal => 0.0,
            std::cmp::Ordering::Greater => -self.rate,
        };
        self.tokens.iter().map(step).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(tokens: &[u64], rate: f64) -> ExpertTokens {
        ExpertTokens { layer: 1, param: 7, rate, tokens: tokens.to_vec() }
    }

    #[test]
    fn the_bias_moves_towards_the_mean() {
        assert_eq!(counts(&[4, 1, 0, 3], 0.5).steps(), [-0.5, 0.5, 0.5, -0.5]);
        assert_eq!(counts(&[1, 1, 1, 0, 2], 1.0).steps(), [0.0, 0.0, 0.0, 1.0, -1.0]);
    }

    #[test]
    fn passes_add_up() {
        let all = BiasCounts::default();
        [counts(&[3, 0], 0.5), counts(&[1, 2], 0.5), ExpertTokens { layer: 0, ..counts(&[1, 1], 0.5) }]
            .into_iter()
            .for_each(|counts| all.add(counts));
        assert_eq!(all.take(), [ExpertTokens { layer: 0, ..counts(&[1, 1], 0.5) }, counts(&[4, 2], 0.5)]);
        assert!(all.take().is_empty());
    }
}
