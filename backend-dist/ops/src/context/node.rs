//! Attention in a context as an autograd node.

use burn::backend::{
    Autodiff, TensorMetadata,
    autodiff::{
        checkpoint::strategy::CheckpointStrategy,
        ops::{Backward, OpsKind},
    },
    tensor::FloatTensor,
};

use super::algorithms::{ContextOptions, Saved, backward, forward};
use super::kernels::ContextKernels;
use super::p2p::PointToPoint;
use crate::extension::{node, operations};
use crate::options::PackedHeads;
use crate::plain::attention::unpack;
use crate::saved_attention::CoreAttention;

operations! {
    pub(super) trait ContextOps {
        fn op_attention_over(
            q: FloatTensor<Self>,
            k: FloatTensor<Self>,
            v: FloatTensor<Self>,
            context_options: ContextOptions,
            attention: CoreAttention,
        ) -> FloatTensor<Self> {
            forward::<Self>([q, k, v], &context_options, &attention).0
        }

        fn op_attention_in(
            qkv: FloatTensor<Self>,
            heads: PackedHeads,
            context_options: ContextOptions,
            attention: CoreAttention,
        ) -> FloatTensor<Self> {
            forward::<Self>(unpack::<Self>(qkv, heads), &context_options, &attention).0
        }
    }
}

node!(AttentionOver: ContextKernels + PointToPoint, 3, (Saved<B>, usize, ContextOptions), |ops, grad, grads| {
    let (saved, kv_heads, context_options) = ops.state;
    for (node, value) in ops.parents.into_iter().zip(backward::<B>(saved, grad, kv_heads, &context_options)) {
        if let Some(node) = node {
            grads.register::<B>(node.id, value);
        }
    }
});

node!(AttentionIn: ContextKernels + PointToPoint, 1, (Saved<B>, usize, ContextOptions), |ops, grad, grads| {
    let (saved, kv_heads, context_options) = ops.state;
    // Also if no gradient is needed: the other ranks wait in the collectives.
    let parts = backward::<B>(saved, grad, kv_heads, &context_options);
    if let [Some(node)] = ops.parents {
        grads.register::<B>(node.id, B::float_cat(parts.into(), 2));
    }
});

// Compute-bound: a checkpointing strategy must never repeat a collective without the other ranks.
impl<B: ContextKernels + PointToPoint, C: CheckpointStrategy> ContextOps for Autodiff<B, C> {
    fn op_attention_over(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        context_options: ContextOptions,
        attention: CoreAttention,
    ) -> FloatTensor<Self> {
        let ((q, q_node), (k, k_node), (v, v_node)) = (q.into_parts(), k.into_parts(), v.into_parts());
        let kv_heads = k.shape()[2];
        match AttentionOver.prepare::<C>([q_node, k_node, v_node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let (out, saved) = forward::<B>([q, k, v], &context_options, &attention);
                prep.finish((saved, kv_heads, context_options), out)
            }
            OpsKind::UnTracked(prep) => prep.finish(forward::<B>([q, k, v], &context_options, &attention).0),
        }
    }

    fn op_attention_in(
        qkv: FloatTensor<Self>,
        heads: PackedHeads,
        context_options: ContextOptions,
        attention: CoreAttention,
    ) -> FloatTensor<Self> {
        let (qkv, node) = qkv.into_parts();
        match AttentionIn.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let (out, saved) = forward::<B>(unpack::<B>(qkv, heads), &context_options, &attention);
                prep.finish((saved, heads.kv_heads, context_options), out)
            }
            OpsKind::UnTracked(prep) => {
                prep.finish(forward::<B>(unpack::<B>(qkv, heads), &context_options, &attention).0)
            }
        }
    }
}
