//! Attention in a context as the prologue of a linear layer. Only queries, keys and values are saved: the backward pass
//! recomputes attention, with its collectives on all ranks.

use burn::backend::{TensorMetadata, tensor::FloatTensor};

use super::algorithms::{ContextOptions, Saved, backward, forward};
use super::kernels::{ContextKernels, Qkv};
use super::p2p::PointToPoint;
use crate::saved_attention::CoreAttention;
use crate::step::side_by_side;

/// Recomputed state that the gradient needs.
pub(crate) struct Recomputed<B: ContextKernels> {
    saved: Saved<B>,
    shape: burn::tensor::Shape,
    kv_heads: usize,
}

/// Attention; the output has its heads concatenated, `[s, b, heads d]`.
pub(crate) fn attend<B: ContextKernels + PointToPoint>(
    qkv: Qkv<B>,
    context_options: &ContextOptions,
    attention: &CoreAttention,
) -> (FloatTensor<B>, Recomputed<B>) {
    let kv_heads = qkv[1].shape()[2];
    let (out, saved) = forward::<B>(qkv, context_options, attention);
    let shape = out.shape();
    (side_by_side::<B>(out), Recomputed { saved, shape, kv_heads })
}

impl<B: ContextKernels + PointToPoint> Recomputed<B> {
    /// Gradients of queries, keys and values from that of the concatenated heads.
    pub fn grads(self, grad: FloatTensor<B>, context_options: &ContextOptions) -> Qkv<B> {
        let grad = B::float_reshape(grad, self.shape);
        backward::<B>(self.saved, grad, self.kv_heads, context_options)
    }
}
