//! Attention of one new token of each of several sequences.

use backend_dist::ops::{AttentionOptions, embedding, softcap};
use burn::tensor::{DType, Tensor};

use super::Gather;

/// The type in which scores and their softmax are computed.
pub(super) fn of_scores(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Queries `[b, 1, heads, d]`, one of each sequence, over the keys and values that `gather` names in
/// `pools [slots, kv_heads d]`; `[b, 1, heads, dv]`. Formula: softmax of the scaled and perhaps soft-capped scores, with
/// a sink of each head in the denominator if there are such.
pub(super) fn single_tokens(
    q: Tensor<4>,
    pools: &[Tensor<2>; 2],
    gather: &Gather,
    kv_heads: usize,
    options: AttentionOptions,
    sinks: Option<&Tensor<1>>,
) -> Tensor<4> {
    let ([b, _, heads, d], dtype) = (q.dims(), q.dtype());
    let [keys, values] = pools.clone().map(|pool| {
        let [slots, features] = pool.dims();
        // A position that is not seen gives zeros: what an ended sequence left there could be no number.
        embedding(pool.reshape([slots * kv_heads, features / kv_heads]), gather.ids.clone(), 0)
    });
    let [_, t, dv] = values.dims();
    let q = q.reshape([b * kv_heads, heads / kv_heads, d]);
    let scores = q.matmul(keys.swap_dims(1, 2)).cast(of_scores(dtype)).mul_scalar(options.scale);
    let scores = options.softcap.into_iter().fold(scores, softcap);
    let scores = scores.reshape([b, heads, t]) + gather.bias.clone();
    let highest = scores.clone().max_dim(2);
    let sinks = sinks.map(|sinks| sinks.clone().cast(of_scores(dtype)).reshape([1, heads, 1]).expand([b, heads, 1]));
    let highest = match &sinks {
        Some(sinks) => highest.max_pair(sinks.clone()),
        None => highest,
    };
    let weights = (scores - highest.clone()).exp();
    let total = weights.clone().sum_dim(2);
    let total = match sinks {
        Some(sinks) => total + (sinks - highest).exp(),
        None => total,
    };
    let weights = (weights / total).cast(dtype).reshape([b * kv_heads, heads / kv_heads, t]);
    weights.matmul(values).reshape([b, 1, heads, dv])
}
