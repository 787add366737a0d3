//! What a teacher says of tokens: the probabilities of its likeliest tokens and of all others together.

use std::ops::Range;

/// The likeliest tokens at some positions.
#[derive(Clone, Debug, PartialEq)]
pub struct TopK {
    /// Tokens of a position.
    pub k: usize,
    /// `[positions, k]`.
    pub ids: Vec<i32>,
    /// `[positions, k + 1]`: of each of them, and of the rest of the vocabulary.
    pub probabilities: Vec<f64>,
}

impl TopK {
    /// Some of the positions.
    pub fn slice(&self, positions: Range<usize>) -> Self {
        let Self { k, ids, probabilities } = self;
        Self {
            k: *k,
            ids: ids[positions.start * k..positions.end * k].to_vec(),
            probabilities: probabilities[positions.start * (k + 1)..positions.end * (k + 1)].to_vec(),
        }
    }

    /// All positions of some, which have as many tokens each; `None` of none.
    pub fn concat(parts: impl Iterator<Item = Self>) -> Option<Self> {
        parts.reduce(|mut all, part| {
            all.ids.extend(part.ids);
            all.probabilities.extend(part.probabilities);
            all
        })
    }

    /// The likeliest `k` tokens of a position from the probabilities of all.
    pub fn push(&mut self, probabilities: &[f64]) {
        let mut order: Vec<usize> = (0..probabilities.len()).collect();
        let likelier = |a: &usize, b: &usize| probabilities[*b].total_cmp(&probabilities[*a]).then(a.cmp(b));
        if self.k < order.len() {
            order.select_nth_unstable_by(self.k, likelier);
        }
        order.truncate(self.k);
        order.sort_unstable_by(likelier);
        // Of all tokens nothing is left, not even what rounding leaves.
        let rest = match order.len() == probabilities.len() {
            true => 0.0,
            false => (1.0 - order.iter().map(|id| probabilities[*id]).sum::<f64>()).max(0.0),
        };
        self.ids.extend(order.iter().map(|id| *id as i32));
        self.probabilities.extend(order.iter().map(|id| probabilities[*id]).chain([rest]));
    }
}
