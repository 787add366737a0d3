//! Attention in a context as one node of the graph.

#[cfg(feature = "cuda")]
use burn::backend::Cube;
use burn::backend::{
    Autodiff, Backend, Flex, TensorMetadata,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::FloatTensor,
};

use super::kernels::ContextKernels;
use super::neighbours::Neighbours;
use super::ways::{How, Kept, backward, forward};
use crate::ops::options::PackedHeads;
use crate::ops::plain::attention::unpack;

#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Autodiff)]
pub(super) trait ContextOps: Backend {
    fn op_attention_over(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        how: How,
    ) -> FloatTensor<Self>;

    fn op_attention_in(qkv: FloatTensor<Self>, heads: PackedHeads, how: How) -> FloatTensor<Self>;
}

macro_rules! context_ops {
    ($backend:ty) => {
        impl ContextOps for $backend {
            fn op_attention_over(
                q: FloatTensor<Self>,
                k: FloatTensor<Self>,
                v: FloatTensor<Self>,
                how: How,
            ) -> FloatTensor<Self> {
                forward::<Self>([q, k, v], &how).0
            }

            fn op_attention_in(qkv: FloatTensor<Self>, heads: PackedHeads, how: How) -> FloatTensor<Self> {
                forward::<Self>(unpack::<Self>(qkv, heads), &how).0
            }
        }
    };
}

context_ops!(Flex);
#[cfg(feature = "cuda")]
context_ops!(Cube);

#[derive(Debug)]
struct Over;

impl<B: ContextKernels + Neighbours> Backward<B, 3> for Over {
    type State = (Kept<B>, usize, How);

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let (kept, kv_heads, how) = ops.state;
        for (node, value) in ops.parents.into_iter().zip(backward::<B>(kept, grad, kv_heads, &how)) {
            if let Some(node) = node {
                grads.register::<B>(node.id, value);
            }
        }
    }
}

#[derive(Debug)]
struct In;

impl<B: ContextKernels + Neighbours> Backward<B, 1> for In {
    type State = (Kept<B>, usize, How);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let (kept, kv_heads, how) = ops.state;
        // Also where nobody asks for the gradient: the other ranks wait in the exchanges.
        let parts = backward::<B>(kept, grad, kv_heads, &how);
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, B::float_cat(parts.into(), 2));
        }
    }
}

// Compute-bound: a checkpointing strategy must never repeat an exchange, its peers would not.
impl<B: ContextKernels + Neighbours, C: CheckpointStrategy> ContextOps for Autodiff<B, C> {
    fn op_attention_over(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        how: How,
    ) -> FloatTensor<Self> {
        let ((q, q_node), (k, k_node), (v, v_node)) = (q.into_parts(), k.into_parts(), v.into_parts());
        let kv_heads = k.shape()[2];
        match Over.prepare::<C>([q_node, k_node, v_node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let (out, kept) = forward::<B>([q, k, v], &how);
                prep.finish((kept, kv_heads, how), out)
            }
            OpsKind::UnTracked(prep) => prep.finish(forward::<B>([q, k, v], &how).0),
        }
    }

    fn op_attention_in(qkv: FloatTensor<Self>, heads: PackedHeads, how: How) -> FloatTensor<Self> {
        let (qkv, node) = qkv.into_parts();
        match In.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let (out, kept) = forward::<B>(unpack::<B>(qkv, heads), &how);
                prep.finish((kept, heads.kv_heads, how), out)
            }
            OpsKind::UnTracked(prep) => prep.finish(forward::<B>(unpack::<B>(qkv, heads), &how).0),
        }
    }
}
