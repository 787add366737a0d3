//! Collectives by DMA copy engines, which leave all SMs to what the GPU computes meanwhile.

use burn::backend::{Cube, TensorMetadata, ops::FloatTensorOps};
use burn::tensor::Shape;

use super::blocks::resized;
use super::dma_overlap::{PendingSum, scattered_in, uses_dma, whole_of};
use super::factors::Factor;
use super::{Float, rows};
use gpu::cuda::dense;
use ranks::collective_ops::Collective;
use ranks::comm::{Group, ReduceOp};
use ranks::overlap::Pending;

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
    let (shape, bytes) = (x.meta.shape(), bytes(x));
    match *what {
        Collective::AllGather(dim) if has_shards(bytes, x, group) => {
            let whole = gathered(&first(dim), group, meanwhile);
            Some(Cube::float_swap_dims(whole, 0, dim))
        }
        Collective::ReduceScatter(dim) if divides(group, shape[dim]) && has_shards(bytes / group.size(), x, group) => {
            let shard = summed(PendingSum::new(first(dim), group), meanwhile);
            Some(Cube::float_swap_dims(shard, 0, dim))
        }
        Collective::AllReduce(ReduceOp::Sum) if has_shards(bytes / group.size(), x, group) => {
            let shards = Shape::from([group.size(), shape.num_elements() / group.size()]);
            let shards = Cube::float_reshape(dense(x.clone()), shards);
            let whole = gathered(&summed(PendingSum::new(shards, group), meanwhile), group, meanwhile);
            Some(Cube::float_reshape(whole, shape.clone()))
        }
        _ => None,
    }
}

/// The reduce-scatter along dimension 0 or the all-reduce of `a · b`, `b` one matrix for all rows of `a`: the shards of other
/// members are computed first and travel meanwhile, unless `meanwhile` fills that time. `None` as in [`collective_by_dma`].
pub fn gemm_and_collective_by_dma(
    [a, b]: [&Float; 2],
    what: &Collective,
    group: &Group,
    (meanwhile, fills): (&mut dyn FnMut(usize), bool),
) -> Option<Float> {
    let matrix = one_matrix(b);
    let factor = Factor { w: matrix, transposed: false };
    let (rows, is_scattered) = (rows(a), matches!(what, Collective::ReduceScatter(0)));
    let is_sum = is_scattered || matches!(what, Collective::AllReduce(ReduceOp::Sum));
    let divided = if is_scattered { a.meta.shape()[0] } else { rows };
    if !is_sum || !divides(group, divided) || !has_shards(factor.bytes(rows) / group.size(), a, group) {
        return None;
    }
    let shape = resized(a, |first| first, factor.columns());
    let a = dense(a.clone());
    let a = if is_scattered { a } else { Cube::float_reshape(a, Shape::from([rows, factor.rows()])) };
    // One copy of all shards either way: what a rank can fill the time with may depend on what it alone has read.
    let sizes = if fills { vec![group.size()] } else { vec![group.size() - 1, 1] };
    let shard = summed(scattered_in(a, &factor, sizes, group), meanwhile);
    Some(if is_scattered { shard } else { Cube::float_reshape(gathered(&shard, group, meanwhile), shape) })
}

fn divides(group: &Group, length: usize) -> bool {
    length.is_multiple_of(group.size())
}

/// Whether shards of so many bytes of a tensor like `x` are copied.
fn has_shards(bytes: usize, x: &Float, group: &Group) -> bool {
    group.size() > 1 && bytes >= LEAST && bytes.is_multiple_of(TOGETHER * x.dtype().size()) && uses_dma(bytes, x, group)
}

/// The matrix `[1, .., rows, columns]` in two dimensions, in place.
fn one_matrix(x: &Float) -> Float {
    let last = x.meta.shape().num_dims() - 1;
    let (shape, strides) = (x.meta.shape()[last - 1..].to_vec(), x.meta.strides()[last - 1..].to_vec());
    let (client, device) = (x.client.clone(), x.device.clone());
    let mut matrix = Float::new_contiguous(client, device, Shape::from(shape), x.handle.clone(), x.dtype);
    matrix.meta.strides_mut().copy_from_slice(&strides);
    matrix
}

fn bytes(x: &Float) -> usize {
    x.meta.shape().num_elements() * x.dtype().size()
}

fn gathered(shard: &Float, group: &Group, meanwhile: &mut dyn FnMut(usize)) -> Float {
    let (whole, arriving) = whole_of(shard, group);
    meanwhile(bytes(&whole) - bytes(shard));
    arriving.into_iter().for_each(Pending::wait);
    whole
}

fn summed(sum: PendingSum, meanwhile: &mut dyn FnMut(usize)) -> Float {
    meanwhile(sum.received());
    sum.wait()
}
