//! Blockwise attention on NVIDIA GPUs, and merging of its results.

use std::ops::Range;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Cube, DType, Slice, TensorMetadata};
use burn::tensor::Shape;
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::attention::merge::{MergedOutput, merge_into};
use kernels_cubecl::attention::{AttentionShape, CallOptions, Dropout, Half};
use kernels_cubecl::pointwise::accumulate as kernels;

use super::attention::{Call, DocumentStarts};
use super::attention_parts::{some_rows, whole};
use super::{Float, empty, launched, packed, work};
use crate::context::kernels::{
    ContextKernels, OutputLse, Qkv, SequenceOptions, add_unfused, forward_by_document, grads_by_document, merge_unfused,
};
use crate::context::plan::ScoreBlock;
use crate::dtype::wide;
use crate::options::AttentionDropout;

/// Elements of a head that the merge kernel reads at a time.
const LANES: usize = 32;

impl ContextKernels for Cube {
    fn block_forward(qkv: &Qkv<Self>, block: &ScoreBlock, sequence: &SequenceOptions) -> OutputLse<Self> {
        if let Some(parts) = by_sample(block, |block| Self::block_forward(qkv, &block, sequence)) {
            let (outs, lses) = parts.into_iter().map(|[out, lse]| (out, lse)).unzip();
            return [Self::float_cat(outs, 1), Self::float_cat(lses, 0)];
        }
        let Some(call) = call(qkv, block, sequence) else { return forward_by_document::<Self>(qkv, block, sequence) };
        let _noted = work::score_block(&qkv[0], block, &sequence.options, false);
        let [q, k, v] = qkv.each_ref().map(|x| call.readable(x.clone()));
        let tensors = [(&q, &block.queries), (&k, &block.keys), (&v, &block.keys)];
        let (out, lse) = call.forward(&q, tensors.map(|(x, rows)| some_rows(x, rows, &block.samples)));
        [out, rows_of_statistics(lse, block.queries.len())]
    }

    fn block_grads(
        qkv: &Qkv<Self>,
        out_lse: &OutputLse<Self>,
        grad: &Float,
        block: &ScoreBlock,
        sequence: &SequenceOptions,
    ) -> Qkv<Self> {
        if let Some(parts) = by_sample(block, |block| Self::block_grads(qkv, out_lse, grad, &block, sequence)) {
            let mut of_input = [vec![], vec![], vec![]];
            for part in parts {
                of_input.iter_mut().zip(part).for_each(|(list, x)| list.push(x));
            }
            return of_input.map(|list| Self::float_cat(list, 1));
        }
        let Some(call) = call(qkv, block, sequence) else {
            return grads_by_document::<Self>(qkv, out_lse, grad, block, sequence);
        };
        let _noted = work::score_block(&qkv[0], block, &sequence.options, true);
        let [q, k, v] = qkv.each_ref().map(|x| call.readable(x.clone()));
        let [out, lse] = out_lse;
        let (out, slope) = (call.readable(out.clone()), call.output_grad(grad.clone()));
        let lse = padded_statistics(lse, block, call.shape.padded_queries());
        let inputs = [(&q, &block.queries), (&k, &block.keys), (&v, &block.keys)];
        let gradients = inputs.map(|(x, rows)| {
            let [_, _, heads, length] = whole(x).shape;
            empty(x, [rows.len(), block.samples.len(), heads, length], x.dtype())
        });
        call.backward_of(
            &q,
            inputs.map(|(x, rows)| some_rows(x, rows, &block.samples)),
            [&out, &slope].map(|x| some_rows(x, &block.queries, &block.samples)),
            &lse.handle,
            gradients.each_ref().map(whole),
        );
        gradients
    }

    /// In place if the part is half precision: the sum has no other owner.
    fn merge(sum: OutputLse<Self>, part: OutputLse<Self>, block: &ScoreBlock) -> OutputLse<Self> {
        if !merges_in_place(&sum, &part) {
            return merge_unfused::<Self>(sum, part, block);
        }
        let ([out, lse], [part_out, part_lse]) = (&sum, &part);
        let part = whole(part_out);
        let [queries, batch, heads, value_dim] = part.shape;
        let element = if part_out.dtype() == DType::F16 { Half::F16 } else { Half::Bf16 };
        let (kv_heads, keys, head_dim, causal, window) = (heads, 1, value_dim, false, None);
        let shape = AttentionShape { batch, heads, kv_heads, queries, keys, head_dim, value_dim, causal, window };
        let rows = some_rows(out, &block.queries, &block.samples);
        let [by_sample, by_head, _] = statistics_strides(lse);
        let skipped = 4 * (block.samples.start * by_sample + block.queries.start);
        let to = MergedOutput {
            out: &rows.handle,
            strides: rows.strides,
            lse: &lse.handle.clone().offset_start(skipped as u64),
            stats_stride: by_head,
        };
        let [_, part_by_head, _] = statistics_strides(part_lse);
        let from = (&part, &part_lse.handle, part_by_head);
        launched("merging attention", merge_into(&out.client, &shape, element, to, from));
        sum
    }

    fn add_rows(sum: Float, value: Float, rows: &Range<usize>, samples: &Range<usize>) -> Float {
        let [all_rows, all_samples, heads, length] = whole(&sum).shape;
        let is_here = matches!(sum.device, cubecl::Device::Cuda(_)) && sum.is_contiguous() && rows.end <= all_rows;
        let half = matches!(value.dtype(), DType::BF16 | DType::F16);
        if !is_here || !half || sum.dtype() != DType::F32 || *samples != (0..all_samples) {
            return add_unfused::<Self>(sum, value, rows, samples);
        }
        let row = all_samples * heads * length;
        let to = sum.handle.clone().offset_start((4 * rows.start * row) as u64);
        let (value, len) = (packed(value), rows.len() * row);
        let done = match value.dtype() {
            DType::F16 => kernels::accumulate::<half::f16>(&value.client, &value.handle, &to, len, true),
            _ => kernels::accumulate::<half::bf16>(&value.client, &value.handle, &to, len, true),
        };
        launched("sum of attention gradients", done);
        sum
    }

    fn zeros(like: &Float, shape: Shape) -> Float {
        if !matches!(like.device, cubecl::Device::Cuda(_)) {
            return Self::float_zeros(shape, &like.device, burn::backend::FloatDType::from(wide(like.dtype())));
        }
        // Contiguous, which CubeCL's zeros need not be.
        let zeros = empty(like, shape, wide(like.dtype()));
        gpu::cuda::clear(&zeros);
        zeros
    }
}

/// The kernel call for a block, if there is a kernel.
fn call([q, k, v]: &Qkv<Cube>, block: &ScoreBlock, sequence: &SequenceOptions) -> Option<Call> {
    if k.dtype() != q.dtype() || v.dtype() != q.dtype() || sequence.options.softcap.is_some() {
        return None;
    }
    let ([_, _, heads, head_dim], [_, _, kv_heads, value_dim]) = (whole(q).shape, whole(v).shape);
    let [batch, queries, keys] = [&block.samples, &block.queries, &block.keys].map(ExactSizeIterator::len);
    let ScoreBlock { causal, window, .. } = *block;
    let shape = AttentionShape { batch, heads, kv_heads, queries, keys, head_dim, value_dim, causal, window };
    let dropout =
        sequence.options.dropout.map(|AttentionDropout { p, seed, first_sample, first_head, heads }| Dropout {
            p: p as f32,
            seed,
            first: [first_sample + block.samples.start, first_head, block.first[0], block.first[1]],
            heads,
            queries: sequence.positions,
        });
    let starts = (!block.documents.is_empty()).then(|| starts(q, block));
    let first_query = starts.is_none().then_some(block.first_query);
    let extras =
        CallOptions { dropout, first_query, deterministic: sequence.options.deterministic, ..Default::default() };
    Call::with(q, shape, sequence.options.scale, extras, starts)
}

/// The starts of a block's documents, on the device.
fn starts(like: &CubeTensor, block: &ScoreBlock) -> DocumentStarts {
    let end = [block.queries.len(), block.keys.len()];
    let all: Vec<[usize; 2]> = block.documents.iter().copied().chain([end]).collect();
    let upload = |i: usize| {
        let bytes: Vec<u8> = all.iter().flat_map(|start| (start[i] as i32).to_ne_bytes()).collect();
        like.client.create_from_slice(&bytes)
    };
    let longest = |i: usize| all.windows(2).map(|pair| pair[1][i] - pair[0][i]).max().unwrap_or(0);
    DocumentStarts {
        handles: [upload(0), upload(1)],
        documents: block.documents.len(),
        longest: [longest(0), longest(1)],
    }
}

/// Splits a block by sample, because the kernels take packed documents of one sample.
fn by_sample<T>(block: &ScoreBlock, f: impl Fn(ScoreBlock) -> T) -> Option<Vec<T>> {
    let is_many = block.samples.len() > 1 && !block.documents.is_empty();
    let of = |sample: usize| ScoreBlock { samples: sample..sample + 1, ..block.clone() };
    is_many.then(|| block.samples.clone().map(of).map(f).collect())
}

/// The log-sum-exp `[b, h, queries]` of `[b, h, padded queries]`, in place.
fn rows_of_statistics(mut lse: CubeTensor, rows: usize) -> CubeTensor {
    lse.meta.shape_mut()[2] = rows;
    lse
}

/// Strides of sample, head and query, also for dimensions of size one.
fn statistics_strides(lse: &CubeTensor) -> [usize; 3] {
    let (shape, strides) = (lse.meta.shape(), lse.meta.strides());
    let by_head = if shape[1] == 1 { strides[0] } else { strides[1] };
    let by_head = if shape[0] == 1 && shape[1] == 1 { shape[2] } else { by_head };
    [by_head * shape[1], by_head, 1]
}

/// The log-sum-exp of a block's queries, `[samples, heads, padded]`; the padding is not read.
fn padded_statistics(lse: &CubeTensor, block: &ScoreBlock, padded: usize) -> CubeTensor {
    let (shape, strides) = (lse.meta.shape(), lse.meta.strides());
    let [samples, heads, rows] = [shape[0], shape[1], shape[2]];
    let is_whole = block.queries == (0..rows) && block.samples == (0..samples);
    if is_whole && strides[2] == 1 && strides[1] == padded && strides[0] == heads * padded {
        return lse.clone();
    }
    let of_block = [block.samples.clone(), 0..heads, block.queries.clone()].map(Slice::from);
    let value = Cube::float_slice(lse.clone(), &of_block);
    let whole = empty(lse, [block.samples.len(), heads, padded], DType::F32);
    let place = [0..block.samples.len(), 0..heads, 0..block.queries.len()].map(Slice::from);
    Cube::float_slice_assign(whole, &place, value)
}

/// Whether the merge kernel supports these tensors.
fn merges_in_place([out, lse]: &OutputLse<Cube>, [part_out, part_lse]: &OutputLse<Cube>) -> bool {
    let half = matches!(part_out.dtype(), DType::BF16 | DType::F16);
    let single = [out, lse, part_lse].iter().all(|x| x.dtype() == DType::F32);
    let length = part_out.meta.shape()[3];
    let rows_are_dense = [lse, part_lse].iter().all(|x| {
        let (shape, strides) = (x.meta.shape(), x.meta.strides());
        let [by_sample, _, _] = statistics_strides(x);
        (shape[2] == 1 || strides[2] == 1) && (shape[0] == 1 || strides[0] == by_sample)
    });
    let heads_are_dense = [out, part_out].iter().all(|x| x.meta.strides()[3] == 1);
    let on_gpu = matches!(out.device, cubecl::Device::Cuda(_));
    on_gpu && half && single && length.is_multiple_of(LANES) && rows_are_dense && heads_are_dense
}
