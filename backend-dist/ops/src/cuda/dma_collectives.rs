//! Collectives by DMA copy engines, which leave all SMs to what the GPU computes meanwhile.

use burn::backend::{Cube, TensorMetadata, ops::FloatTensorOps};
use burn::tensor::Shape;
use burn_cubecl::tensor::CubeTensor;

use super::blocks::resized;
use super::dma_overlap::{self, Arriving, PendingSum, uses_dma};
use super::factors::Factor;
use super::{Float, columns, packed, rows};
use gpu::cuda::dense;
use ranks::collective_ops::Collective;
use ranks::comm::{Group, ReduceOp};

/// Elements that the kernel which adds shards reads at once.
const TOGETHER: usize = 8;
/// Least bytes of a shard. The threads of all members meet for a copy, which takes more than NCCL's kernel where it is the
/// host that limits a program: with 8 MiB a step of 50 ms took 62 to 90 on two H200s, with 32 MiB one of 111 ms 96 to 105.
const LEAST: usize = 16 << 20;

/// The collective of `x`. `meanwhile` queues what the GPU computes while a transfer is on its way, of which it is given the
/// bytes that a member receives. `None`, and nothing has begun, where NCCL is to do it: another collective, small shards,
/// or members that do not reach each other's memory. All members call it alike; the first call connects them.
pub fn collective_by_dma(
    x: &Float,
    what: &Collective,
    group: &Group,
    meanwhile: &mut dyn FnMut(usize),
) -> Option<Float> {
    let first = |dim: usize| dense(Cube::float_swap_dims(x.clone(), 0, dim));
    let (shape, size) = (x.meta.shape(), group.size());
    match *what {
        Collective::AllGather(dim) if has_shards(x, 1, group) => {
            let whole = gathered(first(dim), group, meanwhile);
            Some(Cube::float_swap_dims(whole, 0, dim))
        }
        Collective::ReduceScatter(dim) if shape[dim].is_multiple_of(size) && has_shards(x, size, group) => {
            let whole = first(dim);
            let shape = resized(&whole, |first| first / size, columns(&whole));
            let shard = Cube::float_reshape(summed(whole, group, meanwhile), shape);
            Some(Cube::float_swap_dims(shard, 0, dim))
        }
        Collective::AllReduce(ReduceOp::Sum) if has_shards(x, size, group) => {
            let whole = gathered(summed(dense(x.clone()), group, meanwhile), group, meanwhile);
            Some(Cube::float_reshape(whole, shape.clone()))
        }
        _ => None,
    }
}

/// Whether shards, of which `x` has so many, are copied.
fn has_shards(x: &Float, shards: usize, group: &Group) -> bool {
    let bytes = bytes(x) / shards;
    group.size() > 1
        && bytes >= LEAST
        && x.meta.shape().num_elements().is_multiple_of(shards * TOGETHER)
        && uses_dma(bytes, x, group)
}

fn bytes(x: &Float) -> usize {
    x.meta.shape().num_elements() * x.dtype().size()
}

fn gathered(shard: Float, group: &Group, meanwhile: &mut dyn FnMut(usize)) -> Float {
    let gather = Arriving::new(shard, group);
    meanwhile(gather.received());
    gather.wait()
}

/// A member's shard `[1, elements]` of the members' sum, whatever shape `whole` has.
fn summed(whole: Float, group: &Group, meanwhile: &mut dyn FnMut(usize)) -> Float {
    let shards = Shape::from([group.size(), whole.meta.shape().num_elements() / group.size()]);
    let sum = PendingSum::new(Cube::float_reshape(whole, shards), group);
    meanwhile(sum.received());
    sum.wait()
}

/// Starts to gather `x` along its first dimension. What is gathered can be read once the [`Arriving`] is dropped, and
/// multiplied before. `None`, and nothing has begun, as with [`collective_by_dma`].
pub fn begin_gather(x: &Float, group: &Group) -> Option<(Float, Arriving)> {
    has_shards(x, 1, group).then(|| {
        let gather = Arriving::new(dense(x.clone()), group);
        (gather.whole.clone(), gather)
    })
}

/// `x · b`, plus `bias`, of every shard of `x` as soon as it is there; `b` is `[1, .., k, n]` in the type of `x`.
pub fn gemm_of_arriving(x: Arriving, b: Float, bias: Option<Float>) -> Float {
    x.multiply(&factor(b), bias.map(packed))
}

/// An all-reduce, or a reduce-scatter of the first dimension, of `a · b` plus `bias`: the other members' shards are computed
/// first and travel while this one's is. `b` is `[1, .., k, n]` in the type of `a`. `None`, and nothing has begun, as with
/// [`collective_by_dma`].
pub fn gemm_and_collective(
    (a, b, bias): (Float, Float, Option<Float>),
    what: &Collective,
    group: &Group,
    meanwhile: &mut dyn FnMut(usize),
) -> Option<Float> {
    let (size, factor) = (group.size(), factor(b));
    let shape = resized(&a, |first| first, factor.columns());
    let is_summed = matches!(what, Collective::AllReduce(ReduceOp::Sum) | Collective::ReduceScatter(0));
    let bytes = factor.bytes(rows(&a)) / size;
    let fits =
        bytes >= LEAST && shape[0].is_multiple_of(size) && (shape.num_elements() / size).is_multiple_of(TOGETHER);
    if !is_summed || !a.is_contiguous() || !fits || !uses_dma(bytes, &a, group) {
        return None;
    }
    let sum = dma_overlap::scattered(a, (&factor, bias.map(packed).as_ref()), 0.0, group);
    meanwhile(sum.received());
    let shard = sum.wait();
    Some(match what {
        Collective::AllReduce(_) => gathered(shard, group, meanwhile),
        _ => shard,
    })
}

/// The matrix `[1, .., k, n]`, whatever its strides.
fn factor(w: Float) -> Factor {
    let lead = w.meta.shape().num_dims() - 2;
    let shape = Shape::from(w.meta.shape()[lead..].to_vec());
    let mut matrix = CubeTensor::new_contiguous(w.client, w.device, shape, w.handle, w.dtype);
    matrix.meta.strides_mut().copy_from_slice(&w.meta.strides()[lead..]);
    Factor { w: matrix, transposed: false }
}
