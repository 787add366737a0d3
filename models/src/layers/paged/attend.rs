//! Attention of one new token of each of several sequences.

use backend_dist::ops::{AttentionOptions, embedding, matmul, softcap, sum_dim};
use burn::tensor::{DType, Int, Tensor};

/// The matrix rows of `[slots kv_heads, d]` that every sequence reads, and what is added to its scores.
#[derive(Clone, Debug)]
pub(super) struct Gather {
    /// `[sequences kv_heads, t]`.
    pub ids: Tensor<2, Int>,
    /// `[sequences, 1, t]`: zero, or minus infinity at positions that are not seen.
    pub bias: Tensor<3>,
}

impl Gather {
    /// `[sequences kv_heads, t, d]` of `pool [slots, kv_heads d]`. A position that is not seen gives zeros: what an ended
    /// sequence left there could be no number.
    pub fn read(&self, pool: &Tensor<2>, kv_heads: usize) -> Tensor<3> {
        let [slots, features] = pool.dims();
        embedding(pool.clone().reshape([slots * kv_heads, features / kv_heads]), self.ids.clone(), 0)
    }
}

/// The type in which scores and their softmax are computed.
pub(super) fn of_scores(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Queries `[b, 1, heads, d]`, one of each sequence, over its keys `[b kv_heads, t, d]` and values `[b kv_heads, t, dv]`;
/// `[b, 1, heads, dv]`. Formula: softmax of the scaled and perhaps soft-capped scores, to which `bias [b, 1, t]` is added,
/// with a sink of each head in the denominator if there are such.
pub(super) fn single_tokens(
    q: Tensor<4>,
    [keys, values]: [Tensor<3>; 2],
    bias: Tensor<3>,
    options: AttentionOptions,
    sinks: Option<&Tensor<1>>,
) -> Tensor<4> {
    let ([b, _, heads, d], dtype, [all, t, dv]) = (q.dims(), q.dtype(), values.dims());
    let kv_heads = all / b;
    let q = q.reshape([b * kv_heads, heads / kv_heads, d]);
    let scores = matmul(q, keys.swap_dims(1, 2)).cast(of_scores(dtype)).mul_scalar(options.scale);
    let scores = options.softcap.into_iter().fold(scores, softcap);
    let scores = scores.reshape([b, heads, t]) + bias;
    let highest = scores.clone().max_dim(2);
    let sinks = sinks.map(|sinks| sinks.clone().cast(of_scores(dtype)).reshape([1, heads, 1]).expand([b, heads, 1]));
    let highest = match &sinks {
        Some(sinks) => highest.max_pair(sinks.clone()),
        None => highest,
    };
    let weights = (scores - highest.clone()).exp();
    let total = sum_dim(weights.clone(), 2);
    let total = match sinks {
        Some(sinks) => total + (sinks - highest).exp(),
        None => total,
    };
    let weights = (weights / total).cast(dtype).reshape([b * kv_heads, heads / kv_heads, t]);
    matmul(weights, values).reshape([b, 1, heads, dv])
}
