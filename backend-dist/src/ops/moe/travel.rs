//! Rows that change owner while this rank computes. CPU ranks, and GPUs that several ranks share, do one after the
//! other.

use std::ops::Range;

use burn::backend::{Backend, Flex, Slice, TensorMetadata, tensor::FloatTensor};

use crate::comm::Group;
use crate::exchange::{Exchange, ExchangeOps};

/// How many rows a member sends to each member of a group, and gets from each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Splits {
    /// To each member.
    pub send: Vec<usize>,
    /// From each member.
    pub receive: Vec<usize>,
}

impl Splits {
    /// The way back.
    pub fn reversed(&self) -> Self {
        Self { send: self.receive.clone(), receive: self.send.clone() }
    }

    /// All rows that are sent.
    pub fn sent(&self) -> usize {
        self.send.iter().sum()
    }

    /// All rows that come.
    pub fn received(&self) -> usize {
        self.receive.iter().sum()
    }
}

/// All-to-alls that may run beside the computation. Members start them in the same order. Matrices that travel together
/// have the same rows, and go in one operation where that is possible.
pub(in crate::ops) trait Travel: Backend {
    /// Matrices of rows on their way here.
    type Coming;
    /// Matrices whose rows come piece by piece, one below the other.
    type Joined;

    /// Whether exchanges of rows of `x` take multiprocessors from what runs beside them.
    fn takes_processors(x: &FloatTensor<Self>, group: &Group) -> bool;

    /// Sends rows of `x` from row `first` on.
    fn start(x: &[FloatTensor<Self>], first: usize, splits: &Splits, group: &Group) -> Self::Coming;

    /// What has come.
    fn arrived(coming: Self::Coming) -> Vec<FloatTensor<Self>>;

    /// Nothing yet of matrices with `rows` rows.
    fn none_of(rows: usize) -> Self::Joined;

    /// Sends all rows of `x`; what comes is the next piece of `joined`.
    fn join(x: Vec<FloatTensor<Self>>, splits: &Splits, group: &Group, joined: &mut Self::Joined);

    /// All pieces.
    fn joined(joined: Self::Joined) -> Vec<FloatTensor<Self>>;
}

impl Travel for Flex {
    type Coming = Vec<FloatTensor<Self>>;
    type Joined = Vec<Vec<FloatTensor<Self>>>;

    fn takes_processors(_: &FloatTensor<Self>, _: &Group) -> bool {
        false
    }

    fn start(x: &[FloatTensor<Self>], first: usize, splits: &Splits, group: &Group) -> Self::Coming {
        exchanged::<Self>(x, first, splits, group)
    }

    fn arrived(coming: Self::Coming) -> Vec<FloatTensor<Self>> {
        coming
    }

    fn none_of(_: usize) -> Self::Joined {
        Vec::new()
    }

    fn join(x: Vec<FloatTensor<Self>>, splits: &Splits, group: &Group, joined: &mut Self::Joined) {
        append::<Self>(x, splits, group, joined);
    }

    fn joined(joined: Self::Joined) -> Vec<FloatTensor<Self>> {
        below_each_other::<Self>(joined)
    }
}

/// [`Travel::start`] and [`Travel::arrived`], one matrix after the other.
pub(in crate::ops) fn exchanged<B: Backend + ExchangeOps>(
    x: &[FloatTensor<B>],
    first: usize,
    splits: &Splits,
    group: &Group,
) -> Vec<FloatTensor<B>> {
    let Splits { send, receive } = splits;
    let one = |x: &FloatTensor<B>| {
        let how = Exchange::AllToAll { send: send.clone(), receive: receive.clone() };
        B::exchange(rows::<B>(x, first..first + splits.sent()), how, None, group.clone())
    };
    x.iter().map(one).collect()
}

/// [`Travel::join`] into lists of pieces.
pub(in crate::ops) fn append<B: Backend + ExchangeOps>(
    x: Vec<FloatTensor<B>>,
    splits: &Splits,
    group: &Group,
    pieces: &mut Vec<Vec<FloatTensor<B>>>,
) {
    pieces.resize_with(x.len(), Vec::new);
    pieces.iter_mut().zip(exchanged::<B>(&x, 0, splits, group)).for_each(|(pieces, x)| pieces.push(x));
}

/// [`Travel::joined`] of lists of pieces.
pub(in crate::ops) fn below_each_other<B: Backend>(pieces: Vec<Vec<FloatTensor<B>>>) -> Vec<FloatTensor<B>> {
    pieces.into_iter().map(|pieces| B::float_cat(pieces, 0)).collect()
}

/// Rows of the matrix `x`.
pub(super) fn rows<B: Backend>(x: &FloatTensor<B>, range: Range<usize>) -> FloatTensor<B> {
    let columns = x.shape()[1];
    B::float_slice(x.clone(), &[Slice::from(range), Slice::from(0..columns)])
}
