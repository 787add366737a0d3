//! Sequences that several ranks share, and documents inside them: attention as if one rank had all positions.
//!
//! `plan` says which queries meet which keys in which call of a kernel, `kernels` computes a call and merges results,
//! `ways` brings the keys to the queries, and `node` makes one node of the graph of it.

mod again;
mod api;
mod heads;
pub(crate) mod kernels;
pub(crate) mod neighbours;
mod node;
mod partial;
pub(crate) mod plan;
mod ways;

pub(in crate::ops) use again::attend;
pub(in crate::ops) use api::how;
pub use api::{attention_in_context, attention_over_context};
pub(in crate::ops) use ways::How;

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

impl CpCommType {
    /// Whether `size` ranks can share the sequences of layers with `heads` query heads a rank in this way.
    ///
    /// # Errors
    ///
    /// Says what does not divide what, and the nearest sizes that do.
    pub fn check(self, size: usize, heads: usize) -> Result<(), String> {
        let inner = self.ranks_of_block(size);
        let name = match self {
            Self::P2p | Self::AllGather => return Ok(()),
            Self::A2a => "a2a",
            Self::A2aP2p { .. } => "a2a+p2p",
        };
        if inner == 0 || !size.is_multiple_of(inner) {
            let legal = nearest(inner, |n| size.is_multiple_of(n), size);
            return Err(format!("{name}: blocks of {inner} do not divide {size} ranks; nearest legal: {legal}"));
        }
        if !heads.is_multiple_of(inner) {
            let legal = nearest(inner, |n| heads.is_multiple_of(n), heads);
            return Err(format!(
                "{name}: {inner} ranks do not divide the {heads} query heads of a rank; nearest legal: {legal}. p2p and \
                 all_gather take any number of heads"
            ));
        }
        Ok(())
    }

    /// Ranks inside which heads are exchanged, of `size` ranks.
    fn ranks_of_block(self, size: usize) -> usize {
        match self {
            Self::P2p | Self::AllGather => 1,
            Self::A2a => size,
            Self::A2aP2p { inner } => inner,
        }
    }
}

/// The numbers next to `value` that are legal, up to `most`, which is.
fn nearest(value: usize, is_legal: impl Fn(usize) -> bool, most: usize) -> String {
    let below = (1..value.min(most + 1)).rev().find(|&n| is_legal(n));
    let above = (value + 1..=most).find(|&n| is_legal(n));
    below.into_iter().chain(above).map(|n| n.to_string()).collect::<Vec<_>>().join(" or ")
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

/// The positions of rank `rank` of `size` ranks that have `rows` positions each. The sequence is cut into `2 size`
/// chunks, of which a rank has one from the front and the one as far from the end, so that under a causal mask all have
/// the same work (`get_batch_on_this_cp_rank` in `megatron/core/utils.py`).
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

    #[test]
    fn refusals_name_legal_sizes() {
        assert_eq!(CpCommType::A2a.check(4, 8), Ok(()));
        assert_eq!(CpCommType::P2p.check(4, 7), Ok(()));
        let refused = |comm: CpCommType, size, heads| comm.check(size, heads).expect_err("does not divide");
        assert!(refused(CpCommType::A2a, 4, 6).contains("4 ranks do not divide the 6 query heads"));
        assert!(refused(CpCommType::A2a, 4, 6).contains("nearest legal: 3 or 6"));
        assert!(refused(CpCommType::A2aP2p { inner: 3 }, 4, 6).contains("nearest legal: 2 or 4"));
        assert!(refused(CpCommType::A2aP2p { inner: 0 }, 4, 6).contains("nearest legal: 1"));
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
