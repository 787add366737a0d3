//! Tensors of attention in place: all of one, some heads, or some rows.

use std::ops::Range;

use burn::backend::{DType, TensorMetadata};
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::attention::Tensor4;

use super::empty;
use crate::options::PackedHeads;

/// A tensor `[s, b, h, d]` whose samples lie one after the other if those of `x` do, so that nobody copies it to have the
/// order that `x` has.
pub fn arranged_as(x: &CubeTensor, [s, b, h, d]: [usize; 4], dtype: DType) -> CubeTensor {
    let strides = x.meta.strides();
    if b == 1 || strides[1] <= strides[0] {
        return empty(x, [s, b, h, d], dtype);
    }
    let mut out = empty(x, [b, s, h, d], dtype);
    out.meta.swap(0, 1);
    out
}

/// Heads `first..first + heads` of `x [s, b, h, d]`.
fn some_heads(x: &CubeTensor, first: usize, heads: usize) -> Tensor4 {
    let (shape, strides) = (x.meta.shape(), x.meta.strides());
    // The stride of a dimension of size one may be anything.
    let stride = |i: usize| if shape[i] == 1 { shape[3] } else { strides[i] };
    let skipped = first * stride(2) * x.dtype().size();
    Tensor4 {
        handle: x.handle.clone().offset_start(skipped as u64),
        shape: [shape[0], shape[1], heads, shape[3]],
        strides: [stride(0), stride(1), stride(2)],
    }
}

/// All of `x [s, b, h, d]`.
pub fn whole(x: &CubeTensor) -> Tensor4 {
    some_heads(x, 0, x.meta.shape()[2])
}

/// Some positions and samples of `x [s, b, h, d]`.
pub fn some_rows(x: &CubeTensor, rows: &Range<usize>, samples: &Range<usize>) -> Tensor4 {
    let whole = whole(x);
    let [by_row, by_sample, _] = whole.strides;
    let skipped = (rows.start * by_row + samples.start * by_sample) * x.dtype().size();
    let [_, _, heads, length] = whole.shape;
    Tensor4 {
        handle: whole.handle.offset_start(skipped as u64),
        shape: [rows.len(), samples.len(), heads, length],
        strides: whole.strides,
    }
}

/// `[q | k | v]` in place.
pub fn parts(qkv: &CubeTensor, heads: PackedHeads) -> [Tensor4; 3] {
    let (q, kv) = (heads.heads, heads.kv_heads);
    [(0, q), (q, kv), (q + kv, kv)].map(|(first, count)| some_heads(qkv, first, count))
}
