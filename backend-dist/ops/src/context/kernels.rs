//! The backend kernels of blockwise attention.

use std::ops::Range;

use burn::backend::{FloatDType, Scalar, Shape, Slice, TensorMetadata, tensor::FloatTensor as Float};

use super::plan::ScoreBlock;
use crate::dtype::{cast, wide};
use crate::kernels::LocalKernels;
use crate::options::{AttentionOptions, ScoreOffset};
use crate::plain;
use ranks::collective_ops::CollectiveOps;

/// Options and length of the whole sequence, for all blocks of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SequenceOptions {
    pub options: AttentionOptions,
    /// Positions of the whole sequence.
    pub positions: usize,
}

/// Queries, keys and values `[positions, b, heads, d]`; a block uses some positions and samples.
pub(crate) type Qkv<B> = [Float<B>; 3];

/// Output `[positions, b, heads, dv]` and log-sum-exp `[b, heads, positions]`, which is at least f32.
pub(crate) type OutputLse<B> = [Float<B>; 2];

/// Blockwise attention. The default bodies are formulas and serve every backend.
pub(crate) trait ContextKernels: LocalKernels + CollectiveOps {
    /// Attention of queries at any offset, if each of them sees a key.
    fn attention_at(qkv: Qkv<Self>, options: AttentionOptions, offset: ScoreOffset) -> OutputLse<Self> {
        plain::attention::forward_at::<Self>(qkv, options, offset).into()
    }

    /// The gradients of [`attention_at`](Self::attention_at) from the output and the log-sum-exp over all keys.
    fn attention_grads_at(
        qkv: Qkv<Self>,
        out_lse: OutputLse<Self>,
        grad: Float<Self>,
        options: AttentionOptions,
        offset: ScoreOffset,
    ) -> Qkv<Self> {
        plain::attention::grads_at::<Self>(qkv, out_lse, grad, options, offset)
    }

    /// Attention of a block of scores.
    fn block_forward(qkv: &Qkv<Self>, block: &ScoreBlock, sequence: &SequenceOptions) -> OutputLse<Self> {
        forward_by_document::<Self>(qkv, block, sequence)
    }

    /// Gradients of a block's queries, keys and values, from output, log-sum-exp and output gradient of all positions.
    fn block_grads(
        qkv: &Qkv<Self>,
        out_lse: &OutputLse<Self>,
        grad: &Float<Self>,
        block: &ScoreBlock,
        sequence: &SequenceOptions,
    ) -> Qkv<Self> {
        grads_by_document::<Self>(qkv, out_lse, grad, block, sequence)
    }

    /// Merges `part`, the output and log-sum-exp of `block`, into `sum`: with `l = ln(e^a + e^b)` for the log-sum-exps
    /// `a` and `b`, the outputs are weighted with `e^(a - l)` and `e^(b - l)`, and the new log-sum-exp is `l`. `sum`
    /// has [`wide`] type.
    fn merge(sum: OutputLse<Self>, part: OutputLse<Self>, block: &ScoreBlock) -> OutputLse<Self> {
        merge_unfused::<Self>(sum, part, block)
    }

    /// Adds `value` to some positions and samples of `sum [positions, b, heads, d]`, which has [`wide`] type and no
    /// other owner.
    fn add_rows(sum: Float<Self>, value: Float<Self>, rows: &Range<usize>, samples: &Range<usize>) -> Float<Self> {
        add_unfused::<Self>(sum, value, rows, samples)
    }

    /// Zeros of [`wide`] type, for [`add_rows`](Self::add_rows).
    fn zeros(like: &Float<Self>, shape: Shape) -> Float<Self> {
        Self::float_zeros(shape, &like.device(), FloatDType::from(wide(like.dtype())))
    }
}

/// [`ContextKernels::block_forward`], with a call for each document.
pub(crate) fn forward_by_document<B: ContextKernels>(
    qkv: &Qkv<B>,
    block: &ScoreBlock,
    sequence: &SequenceOptions,
) -> OutputLse<B> {
    let parts = block.by_document().into_iter().map(|block| {
        let (options, offset) = scores(&block, sequence);
        B::attention_at(of_block::<B>(qkv, &block), options, offset)
    });
    let [outs, lses] = unzip(parts);
    [concat::<B>(outs, 0), concat::<B>(lses, 2)]
}

/// [`ContextKernels::block_grads`], with a call for each document.
pub(crate) fn grads_by_document<B: ContextKernels>(
    qkv: &Qkv<B>,
    [out, lse]: &OutputLse<B>,
    grad: &Float<B>,
    block: &ScoreBlock,
    sequence: &SequenceOptions,
) -> Qkv<B> {
    let parts = block.by_document().into_iter().map(|block| {
        let (options, offset) = scores(&block, sequence);
        let rows = |x: &Float<B>| of_rows::<B>(x, &block.queries, &block.samples);
        let lse = slice::<B>(lse.clone(), [block.samples.clone(), 0..lse.shape()[1], block.queries.clone()]);
        B::attention_grads_at(of_block::<B>(qkv, &block), [rows(out), lse], rows(grad), options, offset)
    });
    unzip(parts).map(|x| concat::<B>(x, 0))
}

/// [`ContextKernels::add_rows`] in Burn's primitives.
pub(crate) fn add_unfused<B: ContextKernels>(
    sum: Float<B>,
    value: Float<B>,
    rows: &Range<usize>,
    samples: &Range<usize>,
) -> Float<B> {
    let value = cast::<B>(value, sum.dtype());
    if sum.shape() == value.shape() {
        return B::float_add(sum, value);
    }
    let value = B::float_add(of_rows::<B>(&sum, rows, samples), value);
    B::float_slice_assign(sum, &[Slice::from(rows.clone()), Slice::from(samples.clone())], value)
}

/// Mask and offset of a block of a single document.
fn scores(block: &ScoreBlock, sequence: &SequenceOptions) -> (AttentionOptions, ScoreOffset) {
    let mut options = block.options(sequence.options);
    if let Some(dropout) = &mut options.dropout {
        dropout.first_sample += block.samples.start;
    }
    (options, ScoreOffset { first_query: block.first_query, first: block.first, queries: sequence.positions })
}

/// Slices the leading dimensions.
pub(crate) fn slice<B: ContextKernels>(x: Float<B>, ranges: impl IntoIterator<Item = Range<usize>>) -> Float<B> {
    let slices: Vec<Slice> = ranges.into_iter().map(Slice::from).collect();
    B::float_slice(x, &slices)
}

/// Some positions and samples of `x [positions, b, heads, d]`.
pub(crate) fn of_rows<B: ContextKernels>(x: &Float<B>, rows: &Range<usize>, samples: &Range<usize>) -> Float<B> {
    let shape = x.shape();
    if (0..shape[0]) == *rows && (0..shape[1]) == *samples {
        return x.clone();
    }
    slice::<B>(x.clone(), [rows.clone(), samples.clone(), 0..shape[2], 0..shape[3]])
}

fn of_block<B: ContextKernels>([q, k, v]: &Qkv<B>, block: &ScoreBlock) -> Qkv<B> {
    let [queries, keys] = [&block.queries, &block.keys];
    [(q, queries), (k, keys), (v, keys)].map(|(x, rows)| of_rows::<B>(x, rows, &block.samples))
}

fn unzip<T, const N: usize>(parts: impl Iterator<Item = [T; N]>) -> [Vec<T>; N] {
    let mut all = [const { Vec::new() }; N];
    for part in parts {
        all.iter_mut().zip(part).for_each(|(list, item)| list.push(item));
    }
    all
}

/// Concatenates tensors along `dim`.
pub(crate) fn concat<B: ContextKernels>(mut parts: Vec<Float<B>>, dim: usize) -> Float<B> {
    if parts.len() == 1 { parts.remove(0) } else { B::float_cat(parts, dim) }
}

/// [`ContextKernels::merge`] in Burn's primitives.
pub(crate) fn merge_unfused<B: ContextKernels>(
    [sum, sum_lse]: OutputLse<B>,
    [part_out, part_lse]: OutputLse<B>,
    block: &ScoreBlock,
) -> OutputLse<B> {
    let (rows, samples) = (&block.queries, &block.samples);
    let shape = part_out.shape();
    let ([queries, batch, heads], inner) = ([shape[0], shape[1], shape[2]], sum.dtype());
    let old = slice::<B>(sum_lse.clone(), [samples.clone(), 0..heads, rows.clone()]);
    let flat = |x| B::float_reshape(cast::<B>(x, inner), Shape::from([1, batch * heads * queries]));
    let (a, b) = (flat(old), flat(part_lse));
    let top = B::float_max_dim(B::float_cat(vec![a.clone(), b.clone()], 0), 0);
    // If neither has seen a key, the difference to minus infinity would be a NaN.
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
