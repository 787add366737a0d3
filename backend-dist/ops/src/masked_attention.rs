//! Attention with a mask for single scores and random dropout of weights, as modules of other crates write them.

use burn::backend::{Flex, tensor::FloatTensor as Float};

use super::attention_masks::AttentionMasks;
use super::kernels::LocalKernels;
use super::plain::masked_attention as plain;

/// Attention of `[s, b, h, d]` with masks, not causal. The defaults keep all scores in memory.
pub trait MaskedAttentionKernels: LocalKernels {
    /// Whether that is faster than Burn's operations, for queries `[s, b, h, d]` and so many keys.
    fn has_masked_attention(_queries: &Float<Self>, _keys: usize) -> bool {
        true
    }

    /// `softmax(scale q kᵀ) v [s, b, h, d]`, and the log-sum-exp of the scores, `[b, h, s]` or as the gradient kernels
    /// read it.
    fn masked_attention(qkv: [Float<Self>; 3], masks: &AttentionMasks<Self>, scale: f64) -> [Float<Self>; 2] {
        plain::forward::<Self>(qkv, masks, scale)
    }

    /// The gradients of queries, keys and values, from output and log-sum-exp and the gradient of the output.
    fn masked_attention_grads(
        qkv: [Float<Self>; 3],
        result: [Float<Self>; 2],
        grad: Float<Self>,
        masks: &AttentionMasks<Self>,
        scale: f64,
    ) -> [Float<Self>; 3] {
        plain::grads::<Self>(qkv, result, grad, masks, scale)
    }
}

impl MaskedAttentionKernels for Flex {}
