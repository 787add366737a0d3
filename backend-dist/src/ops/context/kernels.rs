//! What attention by pieces needs of a backend.

use std::ops::Range;

use burn::backend::{DType, FloatDType, Scalar, Shape, Slice, TensorMetadata, tensor::FloatTensor};

use super::plan::Piece;
use crate::exchange::ExchangeOps;
use crate::ops::kernels::LocalKernels;
use crate::ops::options::{AttentionOptions, Place};
use crate::ops::plain;

/// What all pieces of a call share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Whole {
    pub options: AttentionOptions,
    /// Positions of the whole sequence.
    pub positions: usize,
}

/// Queries, keys and values `[rows, b, heads, d]`, of which a piece takes some rows and samples.
pub(crate) type Qkv<B> = [FloatTensor<B>; 3];

/// Output `[rows, b, heads, dv]` and log-sum-exp `[b, heads, rows]`, which is at least f32.
pub(crate) type Seen<B> = [FloatTensor<B>; 2];

/// Attention by pieces. The defaults are formulas and serve every backend.
pub(crate) trait ContextKernels: LocalKernels + ExchangeOps {
    /// Attention of queries at any place, each of which sees a key.
    fn attention_at(qkv: Qkv<Self>, options: AttentionOptions, place: Place) -> Seen<Self> {
        plain::attention::forward_at::<Self>(qkv, options, place).into()
    }

    /// Its gradients from the output and the log-sum-exp over all keys.
    fn attention_grads_at(
        qkv: Qkv<Self>,
        seen: Seen<Self>,
        grad: FloatTensor<Self>,
        options: AttentionOptions,
        place: Place,
    ) -> Qkv<Self> {
        plain::attention::grads_at::<Self>(qkv, seen, grad, options, place)
    }

    /// Attention of a piece.
    fn piece_forward(qkv: &Qkv<Self>, piece: &Piece, whole: &Whole) -> Seen<Self> {
        forward_apart::<Self>(qkv, piece, whole)
    }

    /// Gradients of the rows of a piece, from output, log-sum-exp and output gradient of all rows.
    fn piece_grads(
        qkv: &Qkv<Self>,
        seen: &Seen<Self>,
        grad: &FloatTensor<Self>,
        piece: &Piece,
        whole: &Whole,
    ) -> Qkv<Self> {
        grads_apart::<Self>(qkv, seen, grad, piece, whole)
    }

    /// `sum` after the keys of `piece`, whose result is `part`: with `l = ln(e^a + e^b)` for the log-sum-exps `a` and
    /// `b`, the outputs are weighted with `e^(a - l)` and `e^(b - l)` and the new log-sum-exp is `l`. `sum` has
    /// [`wide`] type.
    fn merge(sum: Seen<Self>, part: Seen<Self>, piece: &Piece) -> Seen<Self> {
        merge_by_formula::<Self>(sum, part, piece)
    }

    /// Adds `value` to rows and samples of `sum [all rows, b, heads, d]`, which nobody else holds and has [`wide`]
    /// type.
    fn add_rows(
        sum: FloatTensor<Self>,
        value: FloatTensor<Self>,
        rows: &Range<usize>,
        samples: &Range<usize>,
    ) -> FloatTensor<Self> {
        add_by_formula::<Self>(sum, value, rows, samples)
    }

    /// Zeros of [`wide`] type, to be added to with [`add_rows`](Self::add_rows).
    fn zeros(like: &FloatTensor<Self>, shape: Shape) -> FloatTensor<Self> {
        Self::float_zeros(shape, &like.device(), FloatDType::from(wide(like.dtype())))
    }
}

/// [`ContextKernels::piece_forward`], a call for each document.
pub(crate) fn forward_apart<B: ContextKernels>(qkv: &Qkv<B>, piece: &Piece, whole: &Whole) -> Seen<B> {
    let parts = piece.apart().into_iter().map(|piece| {
        let (options, place) = scores(&piece, whole);
        B::attention_at(of_piece::<B>(qkv, &piece), options, place)
    });
    let [outs, lses] = unzip(parts);
    [joined::<B>(outs, 0), joined::<B>(lses, 2)]
}

/// [`ContextKernels::piece_grads`], a call for each document.
pub(crate) fn grads_apart<B: ContextKernels>(
    qkv: &Qkv<B>,
    [out, lse]: &Seen<B>,
    grad: &FloatTensor<B>,
    piece: &Piece,
    whole: &Whole,
) -> Qkv<B> {
    let parts = piece.apart().into_iter().map(|piece| {
        let (options, place) = scores(&piece, whole);
        let rows = |x: &FloatTensor<B>| of_rows::<B>(x, &piece.queries, &piece.samples);
        let lse = part::<B>(lse.clone(), [piece.samples.clone(), 0..lse.shape()[1], piece.queries.clone()]);
        B::attention_grads_at(of_piece::<B>(qkv, &piece), [rows(out), lse], rows(grad), options, place)
    });
    unzip(parts).map(|x| joined::<B>(x, 0))
}

/// [`ContextKernels::add_rows`] in Burn's primitives.
pub(crate) fn add_by_formula<B: ContextKernels>(
    sum: FloatTensor<B>,
    value: FloatTensor<B>,
    rows: &Range<usize>,
    samples: &Range<usize>,
) -> FloatTensor<B> {
    let value = cast::<B>(value, sum.dtype());
    if sum.shape() == value.shape() {
        return B::float_add(sum, value);
    }
    let value = B::float_add(of_rows::<B>(&sum, rows, samples), value);
    B::float_slice_assign(sum, &[Slice::from(rows.clone()), Slice::from(samples.clone())], value)
}

/// Mask and place of a piece of a single document.
fn scores(piece: &Piece, whole: &Whole) -> (AttentionOptions, Place) {
    let mut options = piece.options(whole.options);
    if let Some(dropout) = &mut options.dropout {
        dropout.first_sample += piece.samples.start;
    }
    (options, Place { first_query: piece.first_query, first: piece.first, queries: whole.positions })
}

/// The type of sums and statistics: at least f32.
pub(crate) fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

pub(crate) fn cast<B: ContextKernels>(x: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    if x.dtype() == dtype { x } else { B::float_cast(x, FloatDType::from(dtype)) }
}

/// Some of the leading dimensions' elements.
pub(crate) fn part<B: ContextKernels>(
    x: FloatTensor<B>,
    ranges: impl IntoIterator<Item = Range<usize>>,
) -> FloatTensor<B> {
    let slices: Vec<Slice> = ranges.into_iter().map(Slice::from).collect();
    B::float_slice(x, &slices)
}

/// Rows and samples of `x [rows, b, heads, d]`.
pub(crate) fn of_rows<B: ContextKernels>(
    x: &FloatTensor<B>,
    rows: &Range<usize>,
    samples: &Range<usize>,
) -> FloatTensor<B> {
    let shape = x.shape();
    if (0..shape[0]) == *rows && (0..shape[1]) == *samples {
        return x.clone();
    }
    part::<B>(x.clone(), [rows.clone(), samples.clone(), 0..shape[2], 0..shape[3]])
}

fn of_piece<B: ContextKernels>([q, k, v]: &Qkv<B>, piece: &Piece) -> Qkv<B> {
    let [queries, keys] = [&piece.queries, &piece.keys];
    [(q, queries), (k, keys), (v, keys)].map(|(x, rows)| of_rows::<B>(x, rows, &piece.samples))
}

fn unzip<T, const N: usize>(parts: impl Iterator<Item = [T; N]>) -> [Vec<T>; N] {
    let mut all = [const { Vec::new() }; N];
    for part in parts {
        all.iter_mut().zip(part).for_each(|(list, item)| list.push(item));
    }
    all
}

/// Tensors one after the other along `dim`.
pub(crate) fn joined<B: ContextKernels>(mut parts: Vec<FloatTensor<B>>, dim: usize) -> FloatTensor<B> {
    if parts.len() == 1 { parts.remove(0) } else { B::float_cat(parts, dim) }
}

/// [`ContextKernels::merge`] in Burn's primitives.
pub(crate) fn merge_by_formula<B: ContextKernels>(
    [sum, sum_lse]: Seen<B>,
    [part_out, part_lse]: Seen<B>,
    piece: &Piece,
) -> Seen<B> {
    let (rows, samples) = (&piece.queries, &piece.samples);
    let shape = part_out.shape();
    let ([queries, batch, heads], inner) = ([shape[0], shape[1], shape[2]], sum.dtype());
    let old = part::<B>(sum_lse.clone(), [samples.clone(), 0..heads, rows.clone()]);
    let flat = |x| B::float_reshape(cast::<B>(x, inner), Shape::from([1, batch * heads * queries]));
    let (a, b) = (flat(old), flat(part_lse));
    let top = B::float_max_dim(B::float_cat(vec![a.clone(), b.clone()], 0), 0);
    // Where neither has seen a key the difference to minus infinity must not be a NaN.
    let base = B::float_clamp_min(top, Scalar::Float(-1e30));
    let [a, b] = [a, b].map(|x| B::float_exp(B::float_sub(x, base.clone())));
    let total = B::float_add(a.clone(), b.clone());
    let lse = B::float_add(base, B::float_log(total.clone()));
    // The larger of the two is 1, or both are zero.
    let total = B::float_clamp_min(total, Scalar::Float(0.5));
    let weight = |x| {
        let x = B::float_reshape(B::float_div(x, total.clone()), Shape::from([batch, heads, queries, 1]));
        B::float_permute(x, &[2, 0, 1, 3])
    };
    let old = B::float_mul(of_rows::<B>(&sum, rows, samples), weight(a));
    let new = B::float_mul(cast::<B>(part_out, inner), weight(b));
    let (out, lse) = (B::float_add(old, new), B::float_reshape(lse, Shape::from([batch, heads, queries])));
    if sum.shape() == out.shape() {
        return [out, lse];
    }
    let [rows, samples] = [rows, samples].map(|range| Slice::from(range.clone()));
    [
        B::float_slice_assign(sum, &[rows, samples], out),
        B::float_slice_assign(sum_lse, &[samples, Slice::from(0..heads), rows], lse),
    ]
}
