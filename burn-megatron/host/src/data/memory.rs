//! Datasets over one stream of tokens in memory.

use std::sync::Arc;

use super::sample::{Sample, TokenDataset};

/// A stream of tokens split into consecutive samples: sample i predicts tokens `i·S + 1 ..= i·S + S`.
#[derive(Clone, Debug)]
pub struct TokensInMemory {
    tokens: Arc<[i64]>,
    seq_length: usize,
}

impl TokensInMemory {
    /// Splits `tokens` into `(len - 1) / seq_length` samples; the tokens left over are not used.
    ///
    /// # Panics
    /// When `seq_length` is 0.
    pub fn new(tokens: impl Into<Arc<[i64]>>, seq_length: usize) -> Self {
        assert!(seq_length > 0, "a sequence length of 0");
        Self { tokens: tokens.into(), seq_length }
    }
}

impl TokenDataset for TokensInMemory {
    fn len(&self) -> usize {
        self.tokens.len().saturating_sub(1) / self.seq_length
    }

    fn seq_length(&self) -> usize {
        self.seq_length
    }

    fn sample(&self, index: usize) -> Sample {
        assert!(index < self.len(), "sample {index} of {}", self.len());
        let start = index * self.seq_length;
        Sample::from_tokens(self.tokens[start..=start + self.seq_length].to_vec())
    }
}

/// Windows at random positions of a stream of tokens, drawn with replacement as nanoGPT draws its batches. The position
/// depends on the seed and the sample's index only.
#[derive(Clone, Debug)]
pub struct RandomWindows {
    tokens: Arc<[i64]>,
    seq_length: usize,
    samples: usize,
    seed: u64,
}

impl RandomWindows {
    /// `samples` windows of `seq_length` tokens.
    ///
    /// # Panics
    /// When the stream has no window, that is, not more than `seq_length` tokens.
    pub fn new(tokens: impl Into<Arc<[i64]>>, seq_length: usize, samples: usize, seed: u64) -> Self {
        let tokens = tokens.into();
        assert!(tokens.len() > seq_length, "{} tokens hold no window of {seq_length} + 1", tokens.len());
        Self { tokens, seq_length, samples, seed }
    }
}

impl TokenDataset for RandomWindows {
    fn len(&self) -> usize {
        self.samples
    }

    fn seq_length(&self) -> usize {
        self.seq_length
    }

    fn sample(&self, index: usize) -> Sample {
        assert!(index < self.samples, "sample {index} of {}", self.samples);
        let positions = (self.tokens.len() - self.seq_length) as u128;
        let random = splitmix64(splitmix64(self.seed).wrapping_add(index as u64));
        // The high half of the GEMM is uniform over the positions, up to 2^-64 per position.
        let start = ((u128::from(random) * positions) >> 64) as usize;
        Sample::from_tokens(self.tokens[start..=start + self.seq_length].to_vec())
    }
}

/// Output function of SplitMix64 (Steele, Lea and Flood, 2014).
fn splitmix64(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_samples_overlap_by_one_token() {
        let data = TokensInMemory::new((0..10).collect::<Vec<i64>>(), 4);
        assert_eq!(data.len(), 2);
        assert_eq!(data.sample(0), Sample::from_tokens(vec![0, 1, 2, 3, 4]));
        assert_eq!(data.sample(1).tokens, [4, 5, 6, 7]);
        assert_eq!(TokensInMemory::new(Vec::new(), 4).len(), 0);
    }

    #[test]
    fn windows_reach_every_position_and_depend_on_the_seed() {
        let windows = |seed| {
            let data = RandomWindows::new((0..10).collect::<Vec<i64>>(), 4, 200, seed);
            (0..data.len()).map(|i| data.sample(i).tokens[0]).collect::<Vec<_>>()
        };
        let mut starts = windows(1);
        assert_eq!(starts, windows(1));
        assert_ne!(starts, windows(2));
        starts.sort_unstable();
        starts.dedup();
        assert_eq!(starts, [0, 1, 2, 3, 4, 5]);
    }
}
