//! Sequences that several ranks share, and documents inside them.

use std::ops::Range;
use std::sync::Arc;

use crate::comm::Group;

/// How attention reaches the keys of the other ranks of a context parallel group (Megatron's `--cp-comm-type`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CpCommType {
    /// Keys and values go round a ring, one rank further at each step.
    #[default]
    P2p,
    /// Keys and values of all ranks are gathered.
    AllGather,
    /// Every rank gets the whole sequence of some heads (DeepSpeed-Ulysses, <https://arxiv.org/abs/2309.14509>).
    A2a,
    /// Heads are exchanged inside blocks of neighbouring ranks, keys and values go round a ring of blocks.
    A2aP2p {
        /// Ranks of a block.
        inner: usize,
    },
}

/// The ranks that share sequences, and how attention reaches across them.
#[derive(Clone, Debug)]
pub struct ContextParallel {
    /// The ranks.
    pub group: Group,
    /// How.
    pub comm: CpCommType,
}

impl ContextParallel {
    /// The positions of this rank, which has `rows` of them: see [`zigzag`].
    pub fn positions(&self, rows: usize) -> [Range<usize>; 2] {
        zigzag(self.group.rank(), self.group.size(), rows)
    }
}

/// The positions of rank `rank` of `size` ranks that have `rows` positions each. The sequence is cut into `2 size` chunks, of
/// which a rank has one from the front and the one as far from the end, so that under a causal mask all have the same
/// work (`get_batch_on_this_cp_rank` in `megatron/core/utils.py`).
///
/// # Panics
/// If `rows` is odd and there are several ranks.
pub fn zigzag(rank: usize, size: usize, rows: usize) -> [Range<usize>; 2] {
    assert!(
        size == 1 || rows.is_multiple_of(2),
        "context parallel: {rows} positions a rank cannot be cut into two chunks"
    );
    let first = rows / 2;
    let chunk = |index: usize, length: usize| index..index + length;
    match size {
        1 => [0..first, first..rows],
        _ => [chunk(rank * first, first), chunk((2 * size - 1 - rank) * first, first)],
    }
}

/// Where documents begin in each sequence of a batch, ascending and in positions of the whole sequence; the first is 0.
/// Attention does not cross their borders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Documents(Arc<[Vec<usize>]>);

impl Documents {
    /// Starts by sample.
    ///
    /// # Panics
    /// If a sample's starts do not ascend from 0.
    pub fn new(starts: Vec<Vec<usize>>) -> Self {
        for of in &starts {
            let ascends = of.first() == Some(&0) && of.windows(2).all(|pair| pair[0] < pair[1]);
            assert!(ascends, "documents begin at {of:?}: starts must ascend from 0");
        }
        Self(starts.into())
    }

    /// Starts of the documents of a sample.
    pub fn starts(&self, sample: usize) -> &[usize] {
        &self.0[sample]
    }

    /// Number of samples.
    pub fn samples(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_first_rank_has_the_first_and_the_last_chunk() {
        assert_eq!([zigzag(0, 2, 4), zigzag(1, 2, 4)], [[0..2, 6..8], [2..4, 4..6]]);
        assert_eq!(zigzag(0, 1, 5), [0..2, 2..5]);
    }

    proptest! {
        #[test]
        fn every_position_has_one_rank(size in 1usize..9, half in 1usize..6) {
            let mut all: Vec<usize> = (0..size).flat_map(|rank| zigzag(rank, size, 2 * half)).flatten().collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..2 * half * size).collect::<Vec<_>>());
        }
    }
}
