//! Attention of some queries of a sequence with some of its keys, and what makes one result of several, on NVIDIA GPUs.

use std::ops::Range;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Cube, DType, Slice, TensorMetadata};
use burn::tensor::Shape;
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::attention::merge::{Sum, merge_rows};
use kernels_cubecl::attention::{AttentionShape, Dropout, Extras, Half};
use kernels_cubecl::pointwise::accumulate as kernels;

use super::attention::{Call, Starts, some_rows, whole};
use super::{Float, empty, launched, packed, work};
use crate::ops::context::kernels::{
    ContextKernels, Qkv, Seen, Whole, add_by_formula, forward_apart, grads_apart, merge_by_formula, wide,
};
use crate::ops::context::plan::Piece;
use crate::ops::options::AttentionDropout;

/// What the merge kernel reads at a time of a head.
const LANES: usize = 32;

impl ContextKernels for Cube {
    fn piece_forward(qkv: &Qkv<Self>, piece: &Piece, of: &Whole) -> Seen<Self> {
        if let Some(parts) = by_sample(piece, |piece| Self::piece_forward(qkv, &piece, of)) {
            let (outs, lses) = parts.into_iter().map(|[out, lse]| (out, lse)).unzip();
            return [Self::float_cat(outs, 1), Self::float_cat(lses, 0)];
        }
        let Some(call) = call(qkv, piece, of) else { return forward_apart::<Self>(qkv, piece, of) };
        let _noted = work::piece(&qkv[0], piece, &of.options, false);
        let [q, k, v] = qkv.each_ref().map(|x| call.readable(x.clone()));
        let tensors = [(&q, &piece.queries), (&k, &piece.keys), (&v, &piece.keys)];
        let (out, lse) = call.forward(&q, tensors.map(|(x, rows)| some_rows(x, rows, &piece.samples)));
        [out, rows_of_statistics(lse, piece.queries.len())]
    }

    fn piece_grads(qkv: &Qkv<Self>, seen: &Seen<Self>, grad: &Float, piece: &Piece, of: &Whole) -> Qkv<Self> {
        if let Some(parts) = by_sample(piece, |piece| Self::piece_grads(qkv, seen, grad, &piece, of)) {
            let mut of_input = [vec![], vec![], vec![]];
            for part in parts {
                of_input.iter_mut().zip(part).for_each(|(list, x)| list.push(x));
            }
            return of_input.map(|list| Self::float_cat(list, 1));
        }
        let Some(call) = call(qkv, piece, of) else { return grads_apart::<Self>(qkv, seen, grad, piece, of) };
        let _noted = work::piece(&qkv[0], piece, &of.options, true);
        let [q, k, v] = qkv.each_ref().map(|x| call.readable(x.clone()));
        let [out, lse] = seen;
        let (out, slope) = (call.readable(out.clone()), call.slope(grad.clone()));
        let lse = padded_statistics(lse, piece, call.shape.padded_queries());
        let inputs = [(&q, &piece.queries), (&k, &piece.keys), (&v, &piece.keys)];
        let gradients = inputs.map(|(x, rows)| {
            let [_, _, heads, length] = whole(x).shape;
            empty(x, [rows.len(), piece.samples.len(), heads, length], x.dtype())
        });
        call.backward_of(
            &q,
            inputs.map(|(x, rows)| some_rows(x, rows, &piece.samples)),
            [&out, &slope].map(|x| some_rows(x, &piece.queries, &piece.samples)),
            &lse.handle,
            gradients.each_ref().map(whole),
        );
        gradients
    }

    /// In place where the part is half precision: nobody else holds the sum.
    fn merge(sum: Seen<Self>, part: Seen<Self>, piece: &Piece) -> Seen<Self> {
        if !merges_in_place(&sum, &part) {
            return merge_by_formula::<Self>(sum, part, piece);
        }
        let ([out, lse], [part_out, part_lse]) = (&sum, &part);
        let part = whole(part_out);
        let [queries, batch, heads, value_dim] = part.shape;
        let element = if part_out.dtype() == DType::F16 { Half::F16 } else { Half::Bf16 };
        let shape = AttentionShape {
            batch,
            heads,
            kv_heads: heads,
            queries,
            keys: 1,
            head_dim: value_dim,
            value_dim,
            causal: false,
            window: None,
        };
        let rows = some_rows(out, &piece.queries, &piece.samples);
        let [by_sample, by_head, _] = statistics_strides(lse);
        let skipped = 4 * (piece.samples.start * by_sample + piece.queries.start);
        let to = Sum {
            out: &rows.handle,
            strides: rows.strides,
            lse: &lse.handle.clone().offset_start(skipped as u64),
            statistics: by_head,
        };
        let [_, part_by_head, _] = statistics_strides(part_lse);
        let from = (&part, &part_lse.handle, part_by_head);
        launched("merging attention", merge_rows(&out.client, &shape, element, to, from));
        sum
    }

    fn add_rows(sum: Float, value: Float, rows: &Range<usize>, samples: &Range<usize>) -> Float {
        let [all_rows, all_samples, heads, length] = whole(&sum).shape;
        let is_here = matches!(sum.device, cubecl::Device::Cuda(_)) && sum.is_contiguous() && rows.end <= all_rows;
        let half = matches!(value.dtype(), DType::BF16 | DType::F16);
        if !is_here || !half || sum.dtype() != DType::F32 || *samples != (0..all_samples) {
            return add_by_formula::<Self>(sum, value, rows, samples);
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
        // Without gaps, which CubeCL's zeros may have.
        let zeros = empty(like, shape, wide(like.dtype()));
        crate::cuda::clear(&zeros);
        zeros
    }
}

/// The kernel call for a piece, if there is a kernel.
fn call([q, k, v]: &Qkv<Cube>, piece: &Piece, of: &Whole) -> Option<Call> {
    if k.dtype() != q.dtype() || v.dtype() != q.dtype() {
        return None;
    }
    let ([_, _, heads, head_dim], [_, _, kv_heads, value_dim]) = (whole(q).shape, whole(v).shape);
    let shape = AttentionShape {
        batch: piece.samples.len(),
        heads,
        kv_heads,
        queries: piece.queries.len(),
        keys: piece.keys.len(),
        head_dim,
        value_dim,
        causal: piece.causal,
        window: piece.window,
    };
    let dropout = of.options.dropout.map(|AttentionDropout { p, seed, first_sample, first_head, heads }| Dropout {
        p: p as f32,
        seed,
        first: [first_sample + piece.samples.start, first_head, piece.first[0], piece.first[1]],
        heads,
        queries: of.positions,
    });
    let starts = (!piece.documents.is_empty()).then(|| starts(q, piece));
    let first_query = starts.is_none().then_some(piece.first_query);
    Call::with(q, shape, of.options.scale, Extras { dropout, first_query, ..Default::default() }, starts)
}

/// The borders of a piece's documents, on the device.
fn starts(like: &CubeTensor, piece: &Piece) -> Starts {
    let end = [piece.queries.len(), piece.keys.len()];
    let all: Vec<[usize; 2]> = piece.documents.iter().copied().chain([end]).collect();
    let upload = |i: usize| {
        let bytes: Vec<u8> = all.iter().flat_map(|start| (start[i] as i32).to_ne_bytes()).collect();
        like.client.create_from_slice(&bytes)
    };
    let longest = |i: usize| all.windows(2).map(|pair| pair[1][i] - pair[0][i]).max().unwrap_or(0);
    Starts { handles: [upload(0), upload(1)], documents: piece.documents.len(), longest: [longest(0), longest(1)] }
}

/// The kernels take packed documents of one sample at a time.
fn by_sample<T>(piece: &Piece, f: impl Fn(Piece) -> T) -> Option<Vec<T>> {
    let is_many = piece.samples.len() > 1 && !piece.documents.is_empty();
    let of = |sample: usize| Piece { samples: sample..sample + 1, ..piece.clone() };
    is_many.then(|| piece.samples.clone().map(of).map(f).collect())
}

/// The log-sum-exp `[b, h, rows]` of `[b, h, padded rows]`, where it lies.
fn rows_of_statistics(mut lse: CubeTensor, rows: usize) -> CubeTensor {
    lse.meta.shape_mut()[2] = rows;
    lse
}

/// Elements from one sample, head and row to the next, whatever the sizes.
fn statistics_strides(lse: &CubeTensor) -> [usize; 3] {
    let (shape, strides) = (lse.meta.shape(), lse.meta.strides());
    let by_head = if shape[1] == 1 { strides[0] } else { strides[1] };
    let by_head = if shape[0] == 1 && shape[1] == 1 { shape[2] } else { by_head };
    [by_head * shape[1], by_head, 1]
}

/// The log-sum-exp of a piece's rows, `[samples, heads, padded]`: what fills the rows up is not read.
fn padded_statistics(lse: &CubeTensor, piece: &Piece, padded: usize) -> CubeTensor {
    let (shape, strides) = (lse.meta.shape(), lse.meta.strides());
    let [samples, heads, rows] = [shape[0], shape[1], shape[2]];
    let is_whole = piece.queries == (0..rows) && piece.samples == (0..samples);
    if is_whole && strides[2] == 1 && strides[1] == padded && strides[0] == heads * padded {
        return lse.clone();
    }
    let of_piece = [piece.samples.clone(), 0..heads, piece.queries.clone()].map(Slice::from);
    let value = Cube::float_slice(lse.clone(), &of_piece);
    let whole = empty(lse, [piece.samples.len(), heads, padded], DType::F32);
    let place = [0..piece.samples.len(), 0..heads, 0..piece.queries.len()].map(Slice::from);
    Cube::float_slice_assign(whole, &place, value)
}

/// Whether the merge kernel takes these.
fn merges_in_place([out, lse]: &Seen<Cube>, [part_out, part_lse]: &Seen<Cube>) -> bool {
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
