//! The ranks that share the tokens of a micro-batch: with context parallelism, an operand's scale is that of all of its
//! tokens.

use std::ops::Range;
use std::sync::Arc;

use burn::backend::tensor::FloatTensor;

use ranks::collective_ops::{Collective, CollectiveOps};
use ranks::comm::{Group, ReduceOp};

/// The data-parallel ranks that share the sequences of a micro-batch. By default none do.
#[derive(Clone, Debug, Default)]
pub struct Sharing {
    /// The ranks that share this rank's sequences.
    pub ranks: Option<Group>,
    /// Blocks of data-parallel ranks that share sequences in this pass, in order and without gaps, if their sizes
    /// differ; `None` if all are as large as `ranks`. A rank with experts has tokens of other blocks, too.
    pub blocks: Option<Arc<[Range<usize>]>>,
    /// This rank has dummy tokens, which are not recorded in the histories of delayed scaling.
    pub is_dummy: bool,
}

impl Sharing {
    /// The blocks that contain some of `dp_ranks`.
    ///
    /// # Panics
    /// If a block contains further data-parallel ranks, unless it contains all of these.
    pub(super) fn blocks_of(&self, dp_ranks: &Range<usize>) -> Vec<Range<usize>> {
        let size = self.ranks.as_ref().map_or(1, Group::size);
        let block = |dp_rank: usize| match &self.blocks {
            None => dp_rank / size * size..(dp_rank / size + 1) * size,
            Some(blocks) => {
                blocks.iter().find(|block| block.contains(&dp_rank)).cloned().unwrap_or(dp_rank..dp_rank + 1)
            }
        };
        let next = |block_before: &Range<usize>| Some(block_before.end).filter(|end| *end < dp_ranks.end).map(block);
        let blocks: Vec<Range<usize>> = std::iter::successors(Some(block(dp_ranks.start)), next).collect();
        let (first, last) = (&blocks[0], &blocks[blocks.len() - 1]);
        assert!(
            blocks.len() == 1 || first.start == dp_ranks.start && last.end == dp_ranks.end,
            "experts in FP8: data-parallel ranks {dp_ranks:?} divide the experts of a layer, but blocks {blocks:?} of them share sequences; \
             the sizes must divide one the other: take another expert-parallel or context-parallel, or fp8.experts = false"
        );
        blocks
    }

    /// The maximum of each element over the ranks that share this rank's sequences. On GPUs only the compute stream
    /// waits for it.
    pub(super) fn largest<B: CollectiveOps>(&self, amax: FloatTensor<B>) -> FloatTensor<B> {
        self.ranks.iter().fold(amax, |amax, ranks| largest::<B>(amax, ranks))
    }
}

/// The maximum of each element over the ranks of `group`.
pub(super) fn largest<B: CollectiveOps>(amax: FloatTensor<B>, group: &Group) -> FloatTensor<B> {
    match group.size() {
        1 => amax,
        _ => B::collective(amax, Collective::AllReduce(ReduceOp::Max), None, group.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sharing(blocks: &[Range<usize>]) -> Sharing {
        Sharing { blocks: Some(blocks.into()), ..Sharing::default() }
    }

    #[test]
    fn blocks_lie_inside_of_dp_ranks_or_around_them() {
        assert_eq!(Sharing::default().blocks_of(&(2..4)), [2..3, 3..4]);
        let some = sharing(&[0..2, 2..4, 4..5, 5..6]);
        assert_eq!(some.blocks_of(&(0..6)), [0..2, 2..4, 4..5, 5..6]);
        assert_eq!(some.blocks_of(&(2..6)), [2..4, 4..5, 5..6]);
        let around = Vec::from([0..2]);
        assert_eq!([some.blocks_of(&(0..1)), some.blocks_of(&(1..2))], [around.clone(), around]);
    }

    #[test]
    #[should_panic(expected = "data-parallel ranks 2..4 divide the experts of a layer, but blocks [0..3, 3..6]")]
    fn blocks_that_cross_dp_ranks_are_refused() {
        sharing(&[0..3, 3..6]).blocks_of(&(2..4));
    }
}
