//! What sequences cost a rank, to assign them to ranks and to compare assignments.

use layouts::zigzag;

/// What sequences cost, in pairs of positions that attention compares. No count of operations, but enough to weigh
/// lengths.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Effort {
    /// What a token costs outside of attention.
    pub token: f64,
    /// What it costs more when it travels round a block of ranks.
    pub travel: f64,
    /// What a packed sequence costs in addition to its tokens: all weights are read, all their gradients added to.
    pub pass: f64,
}

impl Effort {
    /// Of a model of this width. The matrices of a layer take about 26 hidden² operations per token, those of a head
    /// more, and causal attention 2 hidden per pair of positions, but at two thirds of the rate of GEMMs. A packed
    /// sequence moves about 14 bytes of weights and gradients where a token takes 6 operations, which on GPUs is the
    /// time of a few hundred tokens.
    pub fn of_width(hidden: usize) -> Self {
        let token = 12.0 * hidden as f64;
        Self { token, travel: token / 16.0, pass: 256.0 * token }
    }

    /// Time that each of `ranks` ranks takes for a sequence that they share.
    pub fn of(&self, length: usize, ranks: usize) -> f64 {
        let (length, ranks) = (length as f64, ranks as f64);
        length * (length + self.token) / ranks + self.travel * length * (ranks - 1.0) / ranks
    }

    /// Time of a step's sequences if all of `ranks` ranks had the same to do and nothing travelled: no assignment is
    /// faster.
    pub fn ideal(&self, lengths: impl IntoIterator<Item = usize>, ranks: usize) -> f64 {
        lengths.into_iter().map(|length| self.of(length, 1)).sum::<f64>() / ranks as f64
    }

    /// Time of a step of `packed` sequences, each the lengths of its documents, where `cp` ranks share every one and
    /// `dp` such groups take `micro` of them at a time: that of the group which is done last.
    ///
    /// # Panics
    /// If a packed sequence cannot be split into `2 cp` chunks.
    pub fn of_packed(&self, packed: &[Vec<usize>], micro: usize, dp: usize, cp: usize) -> f64 {
        let mut groups = vec![0.0; dp];
        for (index, packed) in packed.chunks(micro).enumerate() {
            // Ranks that share sequences wait for each other.
            let of = |rank: usize| packed.iter().map(|sequence| self.of_rank(sequence, rank, cp)).sum::<f64>();
            groups[index % dp] += self.pass + (0..cp).map(of).fold(0.0, f64::max);
        }
        groups.into_iter().fold(0.0, f64::max)
    }

    fn of_rank(&self, sequence: &[usize], rank: usize, cp: usize) -> f64 {
        let seq: usize = sequence.iter().sum();
        let (mut pairs, mut start) = (0, 0);
        for length in sequence {
            for positions in zigzag(rank, cp, seq / cp) {
                // The position n after the start of a document attends to n + 1.
                let pairs_before = |end: usize| {
                    let count = end.clamp(start, start + length) - start;
                    count * (count + 1) / 2
                };
                pairs += pairs_before(positions.end) - pairs_before(positions.start);
            }
            start += length;
        }
        let tokens = (seq / cp) as f64;
        2.0 * pairs as f64 + tokens * (self.token + self.travel * (cp - 1) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EFFORT: Effort = Effort { token: 10.0, travel: 1.0, pass: 7.0 };

    #[test]
    fn the_ranks_efforts_add_up_to_the_sequences() {
        let sequence = [5, 1, 10, 8];
        let whole: usize = sequence.iter().map(|length| length * (length + 1)).sum();
        assert_eq!(EFFORT.of_rank(&sequence, 0, 1), whole as f64 + 240.0);
        let shards: f64 = (0..3).map(|rank| EFFORT.of_rank(&sequence, rank, 3)).sum();
        assert_eq!(shards, whole as f64 + 240.0 + 48.0);
    }

    #[test]
    fn a_step_ends_with_its_last_group() {
        let packed = [Vec::from([8]), Vec::from([2; 4]), Vec::from([4; 2]), Vec::from([8])];
        let cost = |sequence: usize| EFFORT.of_rank(&packed[sequence], 0, 1) + 7.0;
        assert_eq!(EFFORT.of_packed(&packed, 1, 2, 1), (cost(0) + cost(2)).max(cost(1) + cost(3)));
        // One document over both ranks is no imbalance; two unequal ones are.
        assert_eq!(EFFORT.of_rank(&[8], 0, 2), EFFORT.of_rank(&[8], 1, 2));
        let ends = |rank| EFFORT.of_rank(&[1, 1, 6], rank, 2);
        assert_eq!(EFFORT.of_packed(&[Vec::from([1, 1, 6])], 1, 1, 2), ends(0).max(ends(1)) + 7.0);
        assert!(EFFORT.ideal([1, 1, 6], 2) < ends(0).max(ends(1)));
    }
}
