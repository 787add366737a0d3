//! The ranks that have the tokens of a micro-batch between them: where sequences are shared (context parallelism), an
//! operand's scale is that of all of its tokens.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::tensor::FloatTensor;

use crate::comm::{Group, ReduceOp};
use crate::exchange::{Exchange, ExchangeOps};

/// Which replicas share the sequences of a micro-batch. The default: none do.
#[derive(Clone, Debug, Default)]
pub struct Sharing {
    /// Those that share this rank's.
    pub ranks: Option<Group>,
    /// Blocks of replicas that share sequences in this pass, in order and without gaps, where they differ in size;
    /// `None` where all are as large as `ranks`. Who holds experts has tokens of other blocks than its own.
    pub blocks: Option<Arc<[Range<usize>]>>,
    /// This rank's tokens mean nothing, and no history of delayed scaling knows of them.
    pub is_nothing: bool,
}

thread_local! {
    static SHARING: RefCell<Sharing> = RefCell::default();
}

/// Runs `layers`, in which the scales of inputs, and of gradients in their backward passes whenever these come, are
/// those of all tokens that the ranks of `sharing` have. All of these ranks must call it with the same layers.
pub fn with_sharing<T>(sharing: Sharing, layers: impl FnOnce() -> T) -> T {
    let _restore = Restore(SHARING.replace(sharing));
    layers()
}

/// Puts what was before back, also after a panic.
struct Restore(Sharing);

impl Drop for Restore {
    fn drop(&mut self) {
        SHARING.set(std::mem::take(&mut self.0));
    }
}

impl Sharing {
    /// That of the layers that run.
    pub(super) fn current() -> Self {
        SHARING.with_borrow(Clone::clone)
    }

    /// The blocks that have some of `replicas`.
    ///
    /// # Panics
    /// If one of them has other replicas too, unless it has all of these.
    pub(super) fn blocks_of(&self, replicas: &Range<usize>) -> Vec<Range<usize>> {
        let size = self.ranks.as_ref().map_or(1, Group::size);
        let block = |replica: usize| match &self.blocks {
            None => replica / size * size..(replica / size + 1) * size,
            Some(blocks) => {
                blocks.iter().find(|block| block.contains(&replica)).cloned().unwrap_or(replica..replica + 1)
            }
        };
        let next = |block_before: &Range<usize>| Some(block_before.end).filter(|end| *end < replicas.end).map(block);
        let blocks: Vec<Range<usize>> = std::iter::successors(Some(block(replicas.start)), next).collect();
        let (first, last) = (&blocks[0], &blocks[blocks.len() - 1]);
        assert!(
            blocks.len() == 1 || first.start == replicas.start && last.end == replicas.end,
            "experts in FP8: replicas {replicas:?} divide the experts of a layer, but blocks {blocks:?} of them share sequences; \
             the sizes must divide one the other: take another expert-parallel or context-parallel, or fp8.experts = false"
        );
        blocks
    }

    /// The largest of each number over the ranks that share this rank's sequences. On GPUs nothing waits for it but the
    /// compute stream.
    pub(super) fn largest<B: ExchangeOps>(&self, amax: FloatTensor<B>) -> FloatTensor<B> {
        self.ranks.iter().fold(amax, |amax, ranks| largest::<B>(amax, ranks))
    }
}

/// The largest of each number over the ranks of `group`.
pub(super) fn largest<B: ExchangeOps>(amax: FloatTensor<B>, group: &Group) -> FloatTensor<B> {
    match group.size() {
        1 => amax,
        _ => B::exchange(amax, Exchange::AllReduce(ReduceOp::Max), None, group.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sharing(blocks: &[Range<usize>]) -> Sharing {
        Sharing { blocks: Some(blocks.into()), ..Sharing::default() }
    }

    #[test]
    fn blocks_lie_inside_of_replicas_or_around_them() {
        assert_eq!(Sharing::default().blocks_of(&(2..4)), [2..3, 3..4]);
        let some = sharing(&[0..2, 2..4, 4..5, 5..6]);
        assert_eq!(some.blocks_of(&(0..6)), [0..2, 2..4, 4..5, 5..6]);
        assert_eq!(some.blocks_of(&(2..6)), [2..4, 4..5, 5..6]);
        let around = Vec::from([0..2]);
        assert_eq!([some.blocks_of(&(0..1)), some.blocks_of(&(1..2))], [around.clone(), around]);
    }

    #[test]
    #[should_panic(expected = "replicas 2..4 divide the experts of a layer, but blocks [0..3, 3..6]")]
    fn blocks_that_cross_replicas_are_refused() {
        sharing(&[0..3, 3..6]).blocks_of(&(2..4));
    }

    #[test]
    fn layers_share_what_their_block_says() {
        let inside = with_sharing(Sharing { is_nothing: true, ..Sharing::default() }, || Sharing::current().is_nothing);
        assert!(inside && !Sharing::current().is_nothing);
    }
}
