//! Attention with sinks: a learned logit of each query head that takes part in the softmax and has no value (gpt-oss).
//!
//! The sink changes output and log-sum-exp of all keys, whoever has computed them: with `l = ln(e^lse + e^sink)` the
//! output is multiplied with `e^(lse - l)`. The gradients of queries, keys and values are then those of attention with
//! this output and `l`, and the sink's is `-Σ e^(sink - l) (grad · output)`. So kernels need not know of sinks.

use burn::backend::{TensorMetadata, autodiff::ops::Ops, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::algorithms::{ContextOptions, Saved, backward_with, forward_with};
use super::{ContextParallel, Documents, api::context_options, sink_softmax::with_sinks};
use crate::operation::{Parents, apply, operation};
use crate::options::{AttentionOptions, ScoreOffset};
use crate::{main_grads::deliver, pass::PassContext, saved_attention::CoreAttention};

/// [`attention_over_context`](super::attention_over_context) with `sinks [hq]`: the softmax of each query head has one
/// more score, its sink, with a value of zero. Without context and documents there may be more keys than queries, as in
/// [`attention`](crate::attention).
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
    let context_options = context_options([s, b], [hq, keys[2]], options, context, documents);
    let [q, k, v] = [q, k, v].map(Tensor::into_dispatch);
    apply(AttentionSinks { context_options, attention: pass.attention.clone() }, [q, k, v, sinks.into_dispatch()])
}

operation! {
    AttentionSinks { context_options: ContextOptions, attention: CoreAttention }, 4,
    (Saved<B>, FloatTensor<B>, usize, ContextOptions),
    |[q, k, v, sinks], _, tracked| {
        let (queries, keys, kv_heads) = (q.shape()[0], k.shape()[0], k.shape()[2]);
        if queries == keys {
            let (out, saved) = forward_with::<B>([q, k, v], Some(&sinks), &context_options, &attention);
            return (out, Some((saved, sinks, kv_heads, context_options)));
        }
        assert!(!tracked.any(), "attention with sinks: gradients of fewer queries than keys");
        let offset = ScoreOffset::whole(queries, keys);
        let [out, _] = with_sinks::<B>(B::attention_at([q, k, v], context_options.options, offset), sinks);
        (out, None)
    },
    |(saved, sinks, kv_heads, context_options), grad, parents| {
        let Parents { ops: Ops { parents: [q, k, v, sinks_node], .. }, grads } = parents;
        let (of_heads, of_sinks) = backward_with::<B>(saved, grad, kv_heads, Some(sinks), &context_options);
        for (node, value) in [q, k, v].into_iter().zip(of_heads) {
            if let Some(node) = node {
                grads.register::<B>(node.id, value);
            }
        }
        if let (Some(node), Some(value)) = (sinks_node, of_sinks) {
            deliver::<B>(grads, node.id, value);
        }
    },
}
