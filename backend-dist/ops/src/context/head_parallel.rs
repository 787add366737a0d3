//! The all-to-all of [`heads`](super::heads) as an autograd node, for layers other than attention that need all
//! positions of a head: Megatron-LM's `_all_to_all_cp2hp` and `_all_to_all_hp2cp`
//! (`megatron/core/ssm/mamba_context_parallel.py`).

use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;

use super::heads::{to_heads, to_sequence};
use super::kernels::ContextKernels;
use crate::operation::{apply, operation};
use ranks::comm::Group;

/// This rank's [positions](super::ContextParallel::positions) of all heads, `[s, b, h, d]`, to all positions of its heads,
/// `[ranks s, b, h / ranks, d]`, in the order of the sequence.
///
/// # Panics
/// If the ranks do not divide the heads, or `s` is odd.
pub fn context_to_head_parallel(x: Tensor<4>, group: &Group) -> Tensor<4> {
    let ([s, _, heads, _], ranks) = (x.dims(), group.size());
    let fits = heads.is_multiple_of(ranks) && (ranks == 1 || s.is_multiple_of(2));
    assert!(fits, "context parallel on {group:?}: {s} positions of {heads} heads cannot be divided");
    all_to_all(x, HeadAllToAll::ToHeads, group)
}

/// The inverse of [`context_to_head_parallel`].
///
/// # Panics
/// If the positions are not two chunks for each rank.
pub fn head_to_context_parallel(x: Tensor<4>, group: &Group) -> Tensor<4> {
    let ([s, ..], ranks) = (x.dims(), group.size());
    assert!(
        ranks == 1 || s.is_multiple_of(2 * ranks),
        "context parallel on {group:?}: {s} positions are not two chunks a rank"
    );
    all_to_all(x, HeadAllToAll::ToPositions, group)
}

fn all_to_all(x: Tensor<4>, to: HeadAllToAll, group: &Group) -> Tensor<4> {
    if group.size() == 1 {
        return x;
    }
    apply(AllToAll { to, group: group.clone() }, [x.into_dispatch()])
}

/// What a rank has afterwards.
#[derive(Clone, Copy, Debug)]
pub(super) enum HeadAllToAll {
    /// All positions of some heads.
    ToHeads,
    /// All heads of some positions.
    ToPositions,
}

impl HeadAllToAll {
    fn run<B: ContextKernels>(self, x: FloatTensor<B>, group: &Group) -> FloatTensor<B> {
        match self {
            Self::ToHeads => to_sequence::<B>(x, group),
            Self::ToPositions => to_heads::<B>(x, group),
        }
    }

    /// Elements change places only, so the inverse is the gradient.
    fn inverse(self) -> Self {
        match self {
            Self::ToHeads => Self::ToPositions,
            Self::ToPositions => Self::ToHeads,
        }
    }
}

operation! {
    AllToAll { to: HeadAllToAll, group: Group }, 1, (HeadAllToAll, Group),
    |[x], _, _| (to.run::<B>(x, &group), Some((to, group))),
    // Also if no gradient is needed: the other ranks wait in the collective.
    |(to, group), grad, parents| parents.register::<B>([to.inverse().run::<B>(grad, &group)]),
}
