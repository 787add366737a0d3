//! Attention with sinks: a learned logit of each query head that takes part in the softmax and has no value (gpt-oss).
//!
//! The sink changes output and log-sum-exp of all keys, whoever has computed them: with `l = ln(e^lse + e^sink)` the
//! output is multiplied with `e^(lse - l)`. The gradients of queries, keys and values are then those of attention with
//! this output and `l`, and the sink's is `-Σ e^(sink - l) (grad · output)`. So kernels need not know of sinks.

#[cfg(feature = "cuda")]
use burn::backend::Cube;
use burn::backend::{
    Autodiff, Backend, Dispatch, Flex, FloatDType, Scalar, Shape, TensorMetadata,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::FloatTensor,
};
use burn::tensor::Tensor;

use super::algorithms::{ContextOptions, Saved, backward_with, forward_with};
use super::api::context_options;
use super::kernels::{ContextKernels, OutputLse, cast, slice};
use super::p2p::PointToPoint;
use super::{ContextParallel, Documents};
use crate::comm::Group;
use crate::ops::main_grads::deliver;
use crate::ops::options::{AttentionOptions, ScoreOffset};
use crate::ops::pass::PassContext;
use crate::ops::saved_attention::CoreAttention;

/// [`attention_over_context`](super::attention_over_context) with `sinks [hq]`: the softmax of each query head has one
/// more score, its sink, with a value of zero. Without context and documents there may be more keys than queries, as in
/// [`attention`](crate::ops::attention).
///
/// # Panics
///
/// As [`attention_over_context`](super::attention_over_context), if there is no sink for each head, and if gradients are
/// wanted of fewer queries than keys.
pub fn attention_with_sinks(
    [q, k, v]: [Tensor<4>; 3],
    sinks: Tensor<1>,
    options: AttentionOptions,
    context: Option<&ContextParallel>,
    documents: Option<&Documents>,
    pass: &PassContext,
) -> Tensor<4> {
    let ([s, b, hq, _], keys) = (q.dims(), k.dims());
    assert_eq!(sinks.dims(), [hq], "attention: a sink for each of {hq} heads");
    let context = context.filter(|context| context.group.size() > 1);
    let whole = context.is_none() && documents.is_none();
    assert!(s == keys[0] || whole && s < keys[0], "attention: q is {:?}, k is {keys:?}", q.dims());
    let options = context_options([s, b], [hq, keys[2]], options, context, documents);
    let ([q, k, v], sinks) = ([q, k, v].map(Tensor::into_dispatch), sinks.into_dispatch());
    Tensor::from_dispatch(<Dispatch as SinkOps>::op_attention_sinks(q, k, v, sinks, options, pass.attention.clone()))
}

#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Autodiff)]
trait SinkOps: Backend {
    fn op_attention_sinks(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        sinks: FloatTensor<Self>,
        context_options: ContextOptions,
        attention: CoreAttention,
    ) -> FloatTensor<Self>;
}

macro_rules! sink_ops {
    ($backend:ty) => {
        impl SinkOps for $backend {
            fn op_attention_sinks(
                q: FloatTensor<Self>,
                k: FloatTensor<Self>,
                v: FloatTensor<Self>,
                sinks: FloatTensor<Self>,
                context_options: ContextOptions,
                attention: CoreAttention,
            ) -> FloatTensor<Self> {
                let (queries, keys) = (q.shape()[0], k.shape()[0]);
                if queries == keys {
                    return forward_with::<Self>([q, k, v], Some(&sinks), &context_options, &attention).0;
                }
                let offset = ScoreOffset::whole(queries, keys);
                let found = <Self as ContextKernels>::attention_at([q, k, v], context_options.options, offset);
                let [out, _] = with_sinks::<Self>(found, sinks);
                out
            }
        }
    };
}

sink_ops!(Flex);
#[cfg(feature = "cuda")]
sink_ops!(Cube);

/// Output `[s, b, h, dv]` and log-sum-exp `[b, h, s]` of keys, with the sinks `[h]` of these heads.
pub(super) fn with_sinks<B: ContextKernels>([out, lse]: OutputLse<B>, sinks: FloatTensor<B>) -> OutputLse<B> {
    let (dtype, wide) = (out.dtype(), lse.dtype());
    let sinks = of_heads::<B>(&lse, sinks);
    let above = B::float_clamp_min(B::float_sub(lse.clone(), sinks.clone()), Scalar::Float(0.0));
    let top = B::float_add(sinks.clone(), above);
    let exp = |x: FloatTensor<B>| B::float_exp(B::float_sub(x, top.clone()));
    let total = B::float_log(B::float_add(exp(lse.clone()), exp(sinks)));
    let total = B::float_add(total, top.clone());
    let share = B::float_exp(B::float_sub(lse, total.clone()));
    let out = B::float_mul(cast::<B>(out, wide), by_position::<B>(share));
    [cast::<B>(out, dtype), total]
}

/// The gradient of the sinks `[h]` from the output and log-sum-exp with them, and the output's gradient.
fn sinks_grad<B: ContextKernels>(
    [out, lse]: &OutputLse<B>,
    grad: &FloatTensor<B>,
    sinks: FloatTensor<B>,
) -> FloatTensor<B> {
    let (dtype, wide, heads) = (sinks.dtype(), lse.dtype(), sinks.shape()[0]);
    let p = B::float_exp(B::float_sub(of_heads::<B>(lse, sinks), lse.clone()));
    let products = B::float_mul(cast::<B>(out.clone(), wide), cast::<B>(grad.clone(), wide));
    let delta = B::float_mul(B::sum_dim(products, 3), by_position::<B>(p));
    let sum = B::sum_dim(B::sum_dim(delta, 1), 0);
    cast::<B>(B::float_neg(B::float_reshape(sum, Shape::from([heads]))), dtype)
}

/// `[h]` as `[b, h, s]` of the log-sum-exp `like`.
fn of_heads<B: ContextKernels>(like: &FloatTensor<B>, sinks: FloatTensor<B>) -> FloatTensor<B> {
    let heads = sinks.shape()[0];
    let sinks = B::float_reshape(cast::<B>(sinks, like.dtype()), Shape::from([1, heads, 1]));
    B::float_expand(sinks, like.shape())
}

/// `[b, h, s]` as `[s, b, h, 1]`.
fn by_position<B: ContextKernels>(x: FloatTensor<B>) -> FloatTensor<B> {
    let shape = x.shape();
    let x = B::float_reshape(x, Shape::from([shape[0], shape[1], shape[2], 1]));
    B::float_permute(x, &[2, 0, 1, 3])
}

impl<B: ContextKernels> Saved<B> {
    /// The gradient of the sinks of all `sinks` heads, zero for heads of other ranks of the inner group; `grad` is that
    /// of the output after the all-to-all.
    pub(super) fn sinks_grad(&self, grad: &FloatTensor<B>, sinks: FloatTensor<B>, inner: &Group) -> FloatTensor<B> {
        let own = sinks_grad::<B>(self.out_lse(), grad, own_sinks::<B>(&sinks, inner));
        let zeros = || B::float_zeros(own.shape(), &own.device(), FloatDType::from(own.dtype()));
        match inner.size() {
            1 => own,
            ranks => {
                let part = |rank: usize| if rank == inner.rank() { own.clone() } else { zeros() };
                B::float_cat((0..ranks).map(part).collect(), 0)
            }
        }
    }
}

/// The sinks of the heads that a rank of the inner group computes.
pub(super) fn own_sinks<B: ContextKernels>(sinks: &FloatTensor<B>, inner: &Group) -> FloatTensor<B> {
    let heads = sinks.shape()[0] / inner.size();
    slice::<B>(sinks.clone(), std::iter::once(inner.rank() * heads..(inner.rank() + 1) * heads))
}

#[derive(Debug)]
struct AttentionSinks;

impl<B: ContextKernels + PointToPoint> Backward<B, 4> for AttentionSinks {
    type State = (Saved<B>, FloatTensor<B>, usize, ContextOptions);

    fn backward(self, ops: Ops<Self::State, 4>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let (saved, sinks, kv_heads, context_options) = ops.state;
        let [q_node, k_node, v_node, sinks_node] = ops.parents;
        let (of_heads, of_sinks) = backward_with::<B>(saved, grad, kv_heads, Some(sinks), &context_options);
        for (node, value) in [q_node, k_node, v_node].into_iter().zip(of_heads) {
            if let Some(node) = node {
                grads.register::<B>(node.id, value);
            }
        }
        if let (Some(node), Some(value)) = (sinks_node, of_sinks) {
            deliver::<B>(grads, node.id, value);
        }
    }
}

// Compute-bound: a checkpointing strategy must never repeat a collective without the other ranks.
impl<B: ContextKernels + PointToPoint, C: CheckpointStrategy> SinkOps for Autodiff<B, C> {
    fn op_attention_sinks(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        sinks: FloatTensor<Self>,
        context_options: ContextOptions,
        attention: CoreAttention,
    ) -> FloatTensor<Self> {
        let ((q, q_node), (k, k_node), (v, v_node)) = (q.into_parts(), k.into_parts(), v.into_parts());
        let (sinks, sinks_node) = sinks.into_parts();
        let (queries, keys, kv_heads) = (q.shape()[0], k.shape()[0], k.shape()[2]);
        assert_eq!(queries, keys, "attention with sinks: gradients of fewer queries than keys");
        let (out, saved) = forward_with::<B>([q, k, v], Some(&sinks), &context_options, &attention);
        match AttentionSinks.prepare::<C>([q_node, k_node, v_node, sinks_node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((saved, sinks, kv_heads, context_options), out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }
}
