//! Tokens of no text, for measuring speed.

use crate::data::{Sample, TokenDataset};

/// Rows of random tokens, the same in every run. Small ids are frequent and large ones rare, about as in a text, so that
/// the loss falls when the model learns.
#[derive(Clone, Copy, Debug)]
pub struct SyntheticTokens {
    vocabulary: usize,
    seq_length: usize,
    rows: usize,
}

impl SyntheticTokens {
    /// `rows` rows of `seq_length` tokens below `vocabulary`.
    pub fn new(vocabulary: usize, seq_length: usize, rows: usize) -> Self {
        Self { vocabulary, seq_length, rows }
    }

    fn token(&self, index: u64) -> i64 {
        let share = (mix(index) >> 11) as f64 / (1u64 << 53) as f64;
        (share.powi(4) * self.vocabulary as f64) as i64
    }
}

/// splitmix64's output function.
fn mix(index: u64) -> u64 {
    let mut z = index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl TokenDataset for SyntheticTokens {
    fn len(&self) -> usize {
        self.rows
    }

    fn seq_length(&self) -> usize {
        self.seq_length
    }

    fn sample(&self, index: usize) -> Sample {
        let first = (index * self.seq_length) as u64;
        Sample::from_row((0..=self.seq_length as u64).map(|at| self.token(first + at)).collect())
    }
}
