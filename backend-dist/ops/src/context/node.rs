//! Attention in a context as an autograd node.

use burn::backend::{
    Autodiff, Backend, TensorMetadata,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::FloatTensor,
};

use super::algorithms::{ContextOptions, Saved, backward, forward};
use super::kernels::ContextKernels;
use super::p2p::PointToPoint;
use crate::extension::on_backends;
use crate::options::PackedHeads;
use crate::plain::attention::unpack;
use crate::saved_attention::CoreAttention;

#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Autodiff)]
pub(super) trait ContextOps: Backend {
    fn op_attention_over(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        context_options: ContextOptions,
        attention: CoreAttention,
    ) -> FloatTensor<Self>;

    fn op_attention_in(
        qkv: FloatTensor<Self>,
        heads: PackedHeads,
        context_options: ContextOptions,
        attention: CoreAttention,
    ) -> FloatTensor<Self>;
}

on_backends! {
    impl ContextOps {
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

#[derive(Debug)]
struct AttentionOver;

impl<B: ContextKernels + PointToPoint> Backward<B, 3> for AttentionOver {
    type State = (Saved<B>, usize, ContextOptions);

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let (saved, kv_heads, context_options) = ops.state;
        for (node, value) in ops.parents.into_iter().zip(backward::<B>(saved, grad, kv_heads, &context_options)) {
            if let Some(node) = node {
                grads.register::<B>(node.id, value);
            }
        }
    }
}

#[derive(Debug)]
struct AttentionIn;

impl<B: ContextKernels + PointToPoint> Backward<B, 1> for AttentionIn {
    type State = (Saved<B>, usize, ContextOptions);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let (saved, kv_heads, context_options) = ops.state;
        // Also if no gradient is needed: the other ranks wait in the collectives.
        let parts = backward::<B>(saved, grad, kv_heads, &context_options);
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, B::float_cat(parts.into(), 2));
        }
    }
}

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
