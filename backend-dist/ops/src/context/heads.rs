//! All-to-all between sequence and heads inside a group (DeepSpeed-Ulysses): a rank has its positions of all heads, or
//! all positions of its heads. Also reorders positions between rank order and sequence order.

use burn::backend::{Shape, TensorMetadata, tensor::FloatTensor};

use super::kernels::{ContextKernels, concat, slice};
use crate::dtype::{cast, wide};
use ranks::collective_ops::Collective;
use ranks::comm::Group;

/// Reorders positions from rank order, each rank's as in [`zigzag`](super::zigzag), to sequence order.
pub(super) fn in_sequence<B: ContextKernels>(x: FloatTensor<B>, ranks: usize) -> FloatTensor<B> {
    if ranks == 1 {
        return x;
    }
    let half = x.shape()[0] / (2 * ranks);
    let chunk = |index: usize| if index < ranks { 2 * index } else { 2 * (2 * ranks - 1 - index) + 1 };
    let parts = (0..2 * ranks).map(chunk).map(|place| slice::<B>(x.clone(), [place * half..(place + 1) * half]));
    concat::<B>(parts.collect(), 0)
}

/// The inverse of [`in_sequence`].
pub(super) fn by_rank<B: ContextKernels>(x: FloatTensor<B>, ranks: usize) -> FloatTensor<B> {
    if ranks == 1 {
        return x;
    }
    let half = x.shape()[0] / (2 * ranks);
    let chunks = (0..ranks).flat_map(|rank| [rank, 2 * ranks - 1 - rank]);
    concat::<B>(chunks.map(|chunk| slice::<B>(x.clone(), [chunk * half..(chunk + 1) * half])).collect(), 0)
}

/// `[s, b, h, d]` to `[ranks s, b, h / ranks, d]`, in sequence order.
pub(super) fn to_sequence<B: ContextKernels>(x: FloatTensor<B>, group: &Group) -> FloatTensor<B> {
    let (shape, ranks) = (x.shape(), group.size());
    let heads = shape[2] / ranks;
    let parts =
        (0..ranks).map(|rank| slice::<B>(x.clone(), [0..shape[0], 0..shape[1], rank * heads..(rank + 1) * heads]));
    in_sequence::<B>(swap::<B>(concat::<B>(parts.collect(), 0), group), ranks)
}

/// The inverse of [`to_sequence`].
pub(super) fn to_heads<B: ContextKernels>(x: FloatTensor<B>, group: &Group) -> FloatTensor<B> {
    let ranks = group.size();
    let x = swap::<B>(by_rank::<B>(x, ranks), group);
    let rows = x.shape()[0] / ranks;
    let parts = (0..ranks).map(|rank| slice::<B>(x.clone(), [rank * rows..(rank + 1) * rows]));
    concat::<B>(parts.collect(), 2)
}

/// An all-to-all of equal shards of dimension 0.
fn swap<B: ContextKernels>(x: FloatTensor<B>, group: &Group) -> FloatTensor<B> {
    let split = vec![x.shape()[0] / group.size(); group.size()];
    B::collective(x, Collective::AllToAll { send: split.clone(), receive: split }, None, group.clone())
}

/// How often key/value heads must be repeated so that the ranks divide them; the ranks divide the query heads.
pub(super) fn repeats(kv_heads: usize, ranks: usize) -> usize {
    let (mut a, mut b) = (kv_heads, ranks);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    ranks / a
}

/// Repeats every head `times` times, next to each other.
pub(super) fn repeated<B: ContextKernels>(x: FloatTensor<B>, times: usize) -> FloatTensor<B> {
    if times == 1 {
        return x;
    }
    let shape = x.shape();
    let single = B::float_reshape(x, Shape::from([shape[0], shape[1] * shape[2], 1, shape[3]]));
    let many = B::float_repeat_dim(single, 2, times);
    B::float_reshape(many, Shape::from([shape[0], shape[1], shape[2] * times, shape[3]]))
}

/// The sum over the repetitions of each head: the gradient of [`repeated`].
pub(super) fn summed<B: ContextKernels>(x: FloatTensor<B>, times: usize) -> FloatTensor<B> {
    if times == 1 {
        return x;
    }
    let (shape, inner) = (x.shape(), wide(x.dtype()));
    let copies = Shape::from([shape[0], shape[1] * shape[2] / times, times, shape[3]]);
    let sum = B::sum_dim(B::float_reshape(cast::<B>(x, inner), copies), 2);
    B::float_reshape(sum, Shape::from([shape[0], shape[1], shape[2] / times, shape[3]]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::zigzag;
    use burn::backend::flex::FlexTensor;
    use burn::backend::{Flex, TensorData};

    fn column(rows: impl IntoIterator<Item = usize>) -> FlexTensor {
        let values: Vec<f64> = rows.into_iter().map(|row| row as f64).collect();
        let shape = [values.len(), 1, 1, 1];
        FlexTensor::from_data(TensorData::new(values, shape))
    }

    #[test]
    fn chunks_find_their_positions() {
        for ranks in 1..5 {
            let total = 4 * ranks;
            let ours = || column((0..ranks).flat_map(|rank| zigzag(rank, ranks, 4)).flatten());
            let sequence = in_sequence::<Flex>(ours(), ranks);
            assert_eq!(sequence.clone().into_data(), column(0..total).into_data(), "{ranks} ranks");
            assert_eq!(by_rank::<Flex>(sequence, ranks).into_data(), ours().into_data(), "{ranks} ranks");
        }
    }

    #[test]
    fn repeats_are_as_few_as_possible() {
        assert_eq!([repeats(8, 2), repeats(2, 4), repeats(3, 2), repeats(1, 3), repeats(6, 4)], [1, 2, 2, 3, 2]);
    }
}
