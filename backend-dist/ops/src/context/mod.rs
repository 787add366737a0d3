//! Context parallelism and packed documents: attention over a sequence that several ranks share, with the result of one
//! rank that has all positions.
//!
//! `plan` lists the kernel calls, each with its ranges of queries and keys. `kernels` computes a call and merges
//! results. `algorithms` moves the keys to the queries, and `node` is the autograd node.

mod algorithms;
mod api;
mod head_parallel;
mod heads;
pub(crate) mod kernels;
mod node;
mod online_softmax;
pub(crate) mod p2p;
mod packed_sinks;
pub(crate) mod plan;
mod recompute;
mod sink_softmax;
mod sinks;

pub(crate) use algorithms::ContextOptions;
pub(crate) use api::context_options;
pub use api::{attention_in_context, attention_over_context};
pub use head_parallel::{context_to_head_parallel, head_to_context_parallel};
pub use layouts::zigzag;
pub(crate) use packed_sinks::SinkKernels;
pub use packed_sinks::attention_packed_with_sinks;
pub(crate) use recompute::attend;
#[cfg(feature = "cuda")]
pub(crate) use sink_softmax::{sinks_grad, with_sinks};
pub use sinks::attention_with_sinks;

use std::ops::Range;
use std::sync::Arc;

use ranks::comm::Group;

/// The communication of attention in a context-parallel group (Megatron's `--cp-comm-type`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CpCommType {
    /// Ring: keys and values move to the next rank at each step.
    #[default]
    P2p,
    /// All-gather of the keys and values of all ranks.
    AllGather,
    /// All-to-all: every rank gets the whole sequence of some heads (DeepSpeed-Ulysses,
    /// <https://arxiv.org/abs/2309.14509>).
    A2a,
    /// All-to-all inside blocks of neighbouring ranks, and a ring of blocks.
    A2aP2p {
        /// Ranks of a block.
        inner: usize,
    },
}

impl CpCommType {
    /// Checks that `size` ranks can share the sequences of layers with `heads` query heads a rank.
    ///
    /// # Errors
    ///
    /// Names what does not divide, and the nearest legal sizes.
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

    /// Ranks of an all-to-all, of `size` ranks.
    fn ranks_of_block(self, size: usize) -> usize {
        match self {
            Self::P2p | Self::AllGather => 1,
            Self::A2a => size,
            Self::A2aP2p { inner } => inner,
        }
    }
}

/// The legal numbers next to `value`, up to `most`, which is legal.
fn nearest(value: usize, is_legal: impl Fn(usize) -> bool, most: usize) -> String {
    let below = (1..value.min(most + 1)).rev().find(|&n| is_legal(n));
    let above = (value + 1..=most).find(|&n| is_legal(n));
    below.into_iter().chain(above).map(|n| n.to_string()).collect::<Vec<_>>().join(" or ")
}

/// The ranks of context parallelism, and the communication of their attention.
///
/// ```
/// use ranks::comm::Group;
/// use ops::context::{ContextParallel, CpCommType};
///
/// let context = ContextParallel { group: Group::single(), comm: CpCommType::P2p };
/// assert_eq!(context.positions(8), [0..4, 4..8]);
/// assert!(CpCommType::A2a.check(4, 6).is_err(), "4 ranks do not divide 6 heads");
/// ```
#[derive(Clone, Debug)]
pub struct ContextParallel {
    /// The ranks.
    pub group: Group,
    /// The communication.
    pub comm: CpCommType,
}

impl ContextParallel {
    /// The positions of this rank, `count` in all: see [`zigzag`].
    pub fn positions(&self, count: usize) -> [Range<usize>; 2] {
        zigzag(self.group.rank(), self.group.size(), count)
    }
}

/// The first positions of the documents in each sequence of a batch, ascending, in positions of the whole sequence; the
/// first is 0. Attention does not cross document boundaries.
///
/// ```
/// use ops::context::Documents;
///
/// let documents = Documents::new(vec![vec![0, 5], vec![0]]);
/// assert_eq!((documents.samples(), documents.starts(0)), (2, &[0, 5][..]));
/// ```
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
}
