//! All-to-alls of tokens that overlap this rank's computation. CPU ranks, and GPUs that several ranks share, do not
//! overlap.

use std::ops::Range;

use burn::backend::{Backend, Flex, Slice, TensorMetadata, tensor::FloatTensor};

use ranks::collective_ops::{Collective, CollectiveOps};
use ranks::comm::{Group, Splits};

/// All-to-alls that may overlap the computation. Members start them in the same order. Matrices that are sent together
/// have the same number of rows, and go in one operation where possible.
pub(crate) trait TokenAllToAll: Backend {
    /// Matrices that are being received.
    type Pending;
    /// Matrices that are received chunk by chunk.
    type Chunked;

    /// Whether all-to-alls of `x` use SMs that overlapped work could use.
    fn uses_sms(x: &FloatTensor<Self>, group: &Group) -> bool;

    /// Sends rows of `x` from row `first` on.
    fn start(x: &[FloatTensor<Self>], first: usize, splits: &Splits, group: &Group) -> Self::Pending;

    /// The received matrices.
    fn received(pending: Self::Pending) -> Vec<FloatTensor<Self>>;

    /// Matrices with `rows` rows, of which no chunk is received yet.
    fn empty(rows: usize) -> Self::Chunked;

    /// Sends all rows of `x`; the received rows are the next chunk of `output`.
    fn append(x: Vec<FloatTensor<Self>>, splits: &Splits, group: &Group, output: &mut Self::Chunked);

    /// The concatenation of all chunks.
    fn concat(output: Self::Chunked) -> Vec<FloatTensor<Self>>;
}

impl TokenAllToAll for Flex {
    type Pending = Vec<FloatTensor<Self>>;
    type Chunked = Vec<Vec<FloatTensor<Self>>>;

    fn uses_sms(_: &FloatTensor<Self>, _: &Group) -> bool {
        false
    }

    fn start(x: &[FloatTensor<Self>], first: usize, splits: &Splits, group: &Group) -> Self::Pending {
        all_to_all_matrices::<Self>(x, first, splits, group)
    }

    fn received(pending: Self::Pending) -> Vec<FloatTensor<Self>> {
        pending
    }

    fn empty(_: usize) -> Self::Chunked {
        Vec::new()
    }

    fn append(x: Vec<FloatTensor<Self>>, splits: &Splits, group: &Group, output: &mut Self::Chunked) {
        append_chunk::<Self>(x, splits, group, output);
    }

    fn concat(output: Self::Chunked) -> Vec<FloatTensor<Self>> {
        concat_chunks::<Self>(output)
    }
}

/// [`TokenAllToAll::start`] and [`TokenAllToAll::received`], one matrix after the other.
pub(crate) fn all_to_all_matrices<B: Backend + CollectiveOps>(
    x: &[FloatTensor<B>],
    first: usize,
    splits: &Splits,
    group: &Group,
) -> Vec<FloatTensor<B>> {
    let Splits { send, receive } = splits;
    let one = |x: &FloatTensor<B>| {
        let all_to_all = Collective::AllToAll { send: send.clone(), receive: receive.clone() };
        B::collective(rows::<B>(x, first..first + splits.sent()), all_to_all, None, group.clone())
    };
    x.iter().map(one).collect()
}

/// [`TokenAllToAll::append`] into lists of chunks.
pub(crate) fn append_chunk<B: Backend + CollectiveOps>(
    x: Vec<FloatTensor<B>>,
    splits: &Splits,
    group: &Group,
    chunks: &mut Vec<Vec<FloatTensor<B>>>,
) {
    chunks.resize_with(x.len(), Vec::new);
    chunks.iter_mut().zip(all_to_all_matrices::<B>(&x, 0, splits, group)).for_each(|(chunks, x)| chunks.push(x));
}

/// [`TokenAllToAll::concat`] of lists of chunks.
pub(crate) fn concat_chunks<B: Backend>(chunks: Vec<Vec<FloatTensor<B>>>) -> Vec<FloatTensor<B>> {
    chunks.into_iter().map(|chunks| B::float_cat(chunks, 0)).collect()
}

/// Rows of the matrix `x`.
pub(super) fn rows<B: Backend>(x: &FloatTensor<B>, range: Range<usize>) -> FloatTensor<B> {
    let columns = x.shape()[1];
    B::float_slice(x.clone(), &[Slice::from(range), Slice::from(0..columns)])
}
