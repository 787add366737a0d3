//! Linear layers whose collectives overlap their GEMMs (Megatron-LM's `--tp-comm-overlap` and
//! `LinearWithGradAccumulationAndAsyncCommunication` in `megatron/core/tensor_parallel/layers.py`).
//!
//! Collectives have a separate stream. Only the GEMM that needs gathered rows waits for their collective. A collective
//! of a GEMM's output starts after that GEMM and is waited for where the output is returned, which in a backward pass
//! is after the weight gradient.

use burn::backend::{Cube, autodiff::grads::Gradients};
use burn_cubecl::tensor::CubeTensor;

use super::blocks::{blocks, chunk_of, resized};
use super::dma_overlap::{self, uses_dma};
use super::factors::{Factor, WeightGrad};
use super::{Float, columns, empty, linear, packed, rows};
use crate::plain;
use crate::tensor_parallel::gemm::{self, Gemms, InputCollective, LinearCollectives, OutputCollective, Weight};
use gpu::cuda::dense;
use layouts::gemm_split::{COLLECTIVE_SMS, Chunks};
use ranks::comm::Group;
use ranks::nccl::{connect, gpu_of};
use ranks::overlap::{Pending, chunks};

impl Gemms for Cube {
    fn gemm(x: Float, w: Float, bias: Option<Float>, collectives: &LinearCollectives) -> Float {
        let by_library = bias.as_ref().is_none_or(|bias| linear::adds_bias(&x, &w, bias));
        let factor = Factor { w: w.clone(), transposed: true };
        match (&collectives.entry, &collectives.exit) {
            (InputCollective::AllGather(group), OutputCollective::None)
                if collectives.overlap && by_library && is_linked(&x, group) =>
            {
                if uses_dma(bytes(&x), &x, group) {
                    return dma_overlap::gathered(x, &factor, bias, group).1;
                }
                let chunks = gather_chunks(&x, &factor, group);
                if chunks.count() > 1 {
                    return gathered(x, &factor, bias, chunks, group).1;
                }
            }
            (InputCollective::None, OutputCollective::ReduceScatter(group))
                if collectives.overlap && can_scatter(&x, group) =>
            {
                if uses_dma(factor.bytes(rows(&x)) / group.size(), &x, group) {
                    return with_bias(dma_overlap::scattered(x, (&factor, None), 0.0, group).wait(), bias);
                }
                let chunks = scatter_chunks(&x, &factor, group);
                if chunks.count() > 1 {
                    return with_bias(arrived(scattered(x, &factor, chunks, group)), bias);
                }
            }
            (InputCollective::None, OutputCollective::AllReduce(group))
                if collectives.overlap && is_linked(&x, group) =>
            {
                let chunks = reduce_chunks(&x, &factor, group);
                if chunks.count() > 1 {
                    return with_bias(arrived(reduced(x, &factor, chunks, group)), bias);
                }
            }
            _ => {}
        }
        gemm::forward::<Self>(x, w, bias, collectives)
    }

    fn gemm_grads(
        grad: Float,
        w: Option<Float>,
        weight: Option<Weight<Self>>,
        collectives: &LinearCollectives,
        grads: &mut Gradients,
    ) -> Option<Float> {
        let Some(factor) =
            w.as_ref().map(|w| Factor { w: w.clone(), transposed: false }).filter(|_| collectives.overlap)
        else {
            return gemm::backward::<Self>(grad, w, weight, collectives, grads);
        };
        match (&collectives.entry, &collectives.exit) {
            (InputCollective::AllGather(group), OutputCollective::None) if can_scatter(&grad, group) => {
                Some(column_grads(grad, &factor, weight, collectives, group, grads))
            }
            (InputCollective::Copy(group), OutputCollective::None) if is_linked(&grad, group) => {
                Some(column_grads(grad, &factor, weight, collectives, group, grads))
            }
            (InputCollective::None, OutputCollective::ReduceScatter(group)) if is_linked(&grad, group) => {
                if uses_dma(bytes(&grad), &grad, group) {
                    let (grad, input_grad) = dma_overlap::gathered(grad, &factor, None, group);
                    gemm::weight_grad::<Self>(grad, weight, &collectives.entry, grads);
                    return Some(input_grad);
                }
                let chunks = gather_chunks(&grad, &factor, group);
                if chunks.count() == 1 {
                    return gemm::backward::<Self>(grad, w, weight, collectives, grads);
                }
                let (grad, input_grad) = gathered(grad, &factor, None, chunks, group);
                gemm::weight_grad::<Self>(grad, weight, &collectives.entry, grads);
                Some(input_grad)
            }
            _ => gemm::backward::<Self>(grad, w, weight, collectives, grads),
        }
    }
}

/// Gradients of a layer whose input is gathered or replicated. Gathering the saved input again overlaps the GEMM of the
/// input gradient, and summing the input gradient overlaps the GEMM of the weight gradient.
fn column_grads(
    grad: Float,
    factor: &Factor,
    weight: Option<Weight<Cube>>,
    collectives: &LinearCollectives,
    group: &Group,
    grads: &mut Gradients,
) -> Float {
    let gathers = matches!(collectives.entry, InputCollective::AllGather(_));
    let (now, late) = match weight {
        Some(weight) if weight.deferral.is_deferring() => (None, Some(weight)),
        weight => (weight, None),
    };
    let by_dma = gathers && uses_dma(factor.bytes(rows(&grad)) / group.size(), &grad, group);
    let Some(weight) = now else {
        gemm::weight_grad::<Cube>(grad.clone(), late, &collectives.entry, grads);
        if by_dma {
            return dma_overlap::scattered(grad, (factor, None), 0.0, group).wait();
        }
        return arrived(match gathers {
            true => scattered(grad.clone(), factor, scatter_chunks(&grad, factor, group), group),
            false => reduced(grad.clone(), factor, reduce_chunks(&grad, factor, group), group),
        });
    };
    if by_dma {
        return dma_overlap::column_grads(grad, factor, weight, group, grads);
    }
    let (Weight { id, input, .. }, grad) = (weight, dense(grad));
    let (input, gather) = if gathers { regathered(input, group) } else { (input, None) };
    let sums = empty(&grad, resized(&grad, |first| first, factor.columns()), grad.dtype);
    let overlapped = gather.as_ref().map_or(0, |_| factor.of(rows(&grad)).overlapped_rows(received(&input, group)));
    for (start, count, left) in in_two(rows(&grad), overlapped) {
        let block = |x| blocks(x, [1, count], count, start);
        factor.multiply(block(&grad), None, &block(&sums), left);
    }
    let (input_grad, sum, bytes) = match gathers {
        true => {
            let shard = empty(&sums, resized(&sums, |first| first / group.size(), columns(&sums)), sums.dtype);
            let sum = chunks::scatter(&sums, &shard, Chunks::whole(rows(&shard), group.size()), 0, group);
            (shard, sum, received(&sums, group))
        }
        false => {
            let sum = chunks::reduce(&sums, Chunks::whole(rows(&sums), 1), 0, group);
            let bytes = 2 * received(&sums, group);
            (sums, sum, bytes)
        }
    };
    drop(gather);
    let of_weight = WeightGrad::new(grad, input, id);
    let gemm = of_weight.gemm();
    of_weight.write(in_two(gemm.rows, gemm.overlapped_rows(bytes)), grads);
    arrived((input_grad, vec![sum]))
}

/// The first `overlapped` of `all` rows, which leave SMs to a collective, and the others: start, number, SMs left.
fn in_two(all: usize, overlapped: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    [(0, overlapped, COLLECTIVE_SMS), (overlapped, all - overlapped, 0)].into_iter().filter(|(_, count, _)| *count > 0)
}

/// The gathered shards, and their GEMM: of each chunk as soon as its rows have arrived.
fn gathered(shard: Float, factor: &Factor, bias: Option<Float>, chunks: Chunks, group: &Group) -> (Float, Float) {
    let (shard, bias) = (dense(shard), bias.map(packed));
    let whole = empty(&shard, resized(&shard, |first| first * chunks.shards, columns(&shard)), shard.dtype);
    // All of them before any GEMM: a collective waits for everything that the compute stream has queued so far.
    let arriving: Vec<Pending> =
        (0..chunks.count()).map(|i| chunks::gather(&shard, &whole, chunks, i, group)).collect();
    let out = empty(&whole, resized(&whole, |first| first, factor.columns()), whole.dtype);
    for (i, chunk) in arriving.into_iter().enumerate() {
        chunk.wait();
        let left = if i + 1 < chunks.count() { COLLECTIVE_SMS } else { 0 };
        factor.multiply(chunk_of(&whole, chunks, i), bias.as_ref(), &chunk_of(&out, chunks, i), left);
    }
    (whole, out)
}

/// The gathered shards, once they have arrived.
fn regathered(shard: Float, group: &Group) -> (Float, Option<Pending>) {
    let shard = dense(shard);
    let whole = empty(&shard, resized(&shard, |first| first * group.size(), columns(&shard)), shard.dtype);
    let pending = chunks::gather(&shard, &whole, Chunks::whole(rows(&shard), group.size()), 0, group);
    (whole, Some(pending))
}

/// This member's shard of the sum of all members' GEMM outputs: the reduce-scatter of each chunk starts after its GEMM.
fn scattered(x: Float, factor: &Factor, chunks: Chunks, group: &Group) -> (Float, Vec<Pending>) {
    let x = dense(x);
    let staged = empty(&x, resized(&x, |first| first, factor.columns()), x.dtype);
    let shard = empty(&x, resized(&x, |first| first / chunks.shards, factor.columns()), x.dtype);
    let launched = (0..chunks.count()).map(|i| {
        let run = blocks(&staged, [chunks.shards, chunks.rows(i)], chunks.rows(i), chunks.staged(i));
        let left = if i > 0 { COLLECTIVE_SMS } else { 0 };
        factor.multiply(chunk_of(&x, chunks, i), None, &run, left);
        chunks::scatter(&staged, &shard, chunks, i, group)
    });
    let pending = launched.collect();
    (shard, pending)
}

/// The sum of all members' GEMM outputs: the all-reduce of each chunk starts after its GEMM.
fn reduced(x: Float, factor: &Factor, chunks: Chunks, group: &Group) -> (Float, Vec<Pending>) {
    let x = dense(x);
    let out = empty(&x, resized(&x, |first| first, factor.columns()), x.dtype);
    let launched = (0..chunks.count()).map(|i| {
        let left = if i > 0 { COLLECTIVE_SMS } else { 0 };
        factor.multiply(chunk_of(&x, chunks, i), None, &chunk_of(&out, chunks, i), left);
        chunks::reduce(&out, chunks, i, group)
    });
    let pending = launched.collect();
    (out, pending)
}

/// The result, for later work of the compute stream.
fn arrived((result, chunks): (Float, Vec<Pending>)) -> Float {
    chunks.into_iter().for_each(Pending::wait);
    result
}

fn with_bias(y: Float, bias: Option<Float>) -> Float {
    match bias {
        Some(bias) => plain::linear::add_bias::<Cube>(y, bias),
        None => y,
    }
}

/// Whether `group` has an NCCL link; the first call is a collective.
fn is_linked(x: &CubeTensor, group: &Group) -> bool {
    let is_matrix = x.meta.shape().len() >= 2 && x.meta.shape().num_elements() > 0;
    is_matrix && group.size() > 1 && connect(group, gpu_of(&x.device)).is_some()
}

/// Whether, in addition, the members divide the rows of `x`.
fn can_scatter(x: &CubeTensor, group: &Group) -> bool {
    is_linked(x, group) && x.meta.shape()[0].is_multiple_of(group.size())
}

fn bytes(x: &CubeTensor) -> usize {
    rows(x) * columns(x) * x.dtype.size()
}

/// Bytes that a rank receives if `whole` is gathered or its sum is scattered.
fn received(whole: &CubeTensor, group: &Group) -> usize {
    bytes_received(rows(whole), columns(whole), whole, group)
}

fn bytes_received(rows: usize, columns: usize, like: &CubeTensor, group: &Group) -> usize {
    rows * columns * like.dtype.size() / group.size() * (group.size() - 1)
}

/// For the GEMM of the members' gathered shards.
fn gather_chunks(shard: &CubeTensor, factor: &Factor, group: &Group) -> Chunks {
    let all = rows(shard) * group.size();
    Chunks::gathered(group.size(), &factor.of(all), bytes_received(all, columns(shard), shard, group))
}

/// For the reduce-scatter of the GEMM's output.
fn scatter_chunks(x: &CubeTensor, factor: &Factor, group: &Group) -> Chunks {
    Chunks::scattered(group.size(), &factor.of(rows(x)), bytes_received(rows(x), factor.columns(), x, group))
}

/// For the all-reduce of the GEMM's output, which transfers it twice.
fn reduce_chunks(x: &CubeTensor, factor: &Factor, group: &Group) -> Chunks {
    Chunks::scattered(1, &factor.of(rows(x)), 2 * bytes_received(rows(x), factor.columns(), x, group))
}
