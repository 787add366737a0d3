//! Several sets of conversations, mixed by weight.

use super::dataset::ChatDataset;
use crate::data::{BlendIndex, Sample, SampleError, TokenDataset};

/// Sequences of several sets, each packed by itself.
#[derive(Clone, Debug)]
pub struct ChatBlend {
    parts: Vec<ChatDataset>,
    index: BlendIndex,
}

impl ChatBlend {
    /// `samples` sequences, of which each set has a share as its weight, of any scale, says (Megatron's
    /// `build_blending_indices`); a set that is used up begins anew in another order, which follows from the seed.
    ///
    /// # Panics
    /// If there are not as many weights as sets.
    pub fn weighted(parts: Vec<ChatDataset>, weights: &[f64], samples: usize, seed: u32) -> Self {
        assert_eq!(parts.len(), weights.len(), "a weight for each set");
        let total: f64 = weights.iter().sum();
        let weights: Vec<f64> = weights.iter().map(|weight| weight / total).collect();
        let index = BlendIndex::weighted(&weights, samples);
        let parts = parts.into_iter().enumerate().map(|(at, part)| part.shuffled(index.taken(at), seed)).collect();
        Self { parts, index }
    }

    /// All sequences of all sets once, evenly mixed.
    pub fn all(parts: Vec<ChatDataset>) -> Self {
        let sizes: Vec<usize> = parts.iter().map(TokenDataset::len).collect();
        Self { index: BlendIndex::exhaustive(&sizes), parts }
    }

    /// At most the first `samples` sequences.
    pub fn first(mut self, samples: usize) -> Self {
        self.index.dataset.truncate(samples);
        self.index.sample.truncate(samples);
        self
    }
}

impl TokenDataset for ChatBlend {
    fn len(&self) -> usize {
        self.index.dataset.len()
    }

    fn seq_length(&self) -> usize {
        self.parts[0].seq_length()
    }

    fn sample(&self, index: usize) -> Sample {
        self.parts[usize::from(self.index.dataset[index])].sample(self.index.sample[index] as usize)
    }

    fn content(&self) -> Result<Option<String>, SampleError> {
        let parts: Result<Vec<Option<String>>, SampleError> = self.parts.iter().map(TokenDataset::content).collect();
        Ok(parts?.into_iter().collect::<Option<Vec<String>>>().map(|parts| parts.join(" ")))
    }
}

#[cfg(test)]
mod tests {
    use super::super::learned::tests::sample;
    use super::super::learned::{ChatLoss, learned};
    use super::*;

    #[test]
    fn weights_are_shares_of_the_sequences() {
        let part = |from: u32, count: u32| {
            let samples =
                (0..count).map(|at| learned(sample(from + 10 * at..from + 10 * at + 4, &[1..4]), ChatLoss::All));
            ChatDataset::of(samples.collect(), 3)
        };
        let blend = ChatBlend::weighted(vec![part(0, 3), part(1000, 5)], &[3.0, 1.0], 16, 7);
        let firsts: Vec<i64> = (0..blend.len()).map(|at| blend.sample(at).tokens[0]).collect();
        assert_eq!((firsts.len(), firsts.iter().filter(|token| **token < 1000).count()), (16, 12));
        // Twelve of three are four epochs.
        assert!(
            [0, 10, 20].iter().all(|token| firsts.iter().filter(|other| *other == token).count() == 4),
            "{firsts:?}"
        );
        let all = ChatBlend::all(vec![part(0, 3), part(1000, 5)]);
        let mut firsts: Vec<i64> = (0..all.len()).map(|at| all.sample(at).tokens[0]).collect();
        firsts.sort_unstable();
        assert_eq!(firsts, [0, 10, 20, 1000, 1010, 1020, 1030, 1040]);
        assert_eq!(all.first(2).len(), 2);
    }
}
