//! Attention with sinks on a packed projection, without context parallelism and documents: its gradient is packed too,
//! and the sinks are one pass over the output.

use burn::backend::{Flex, autodiff::ops::Ops, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::kernels::{ContextKernels, OutputLse};
use super::sink_softmax::{sinks_grad, with_sinks};
use super::sinks::attention_with_sinks;
use super::{ContextParallel, Documents};
use crate::operation::{Parents, apply, operation};
use crate::options::{AttentionOptions, PackedHeads};
use crate::{attention::check_heads, main_grads::deliver, pass::PassContext, saved_attention::CoreAttention};

/// [`attention_with_sinks`] on a packed projection `qkv [s, b, hq + 2 hkv, d] = [q | k | v]`.
///
/// # Panics
///
/// As [`attention_with_sinks`], and if `heads` does not fit `qkv`.
pub fn attention_packed_with_sinks(
    qkv: Tensor<4>,
    heads: PackedHeads,
    sinks: Tensor<1>,
    options: AttentionOptions,
    context: Option<&ContextParallel>,
    documents: Option<&Documents>,
    pass: &PassContext,
) -> Tensor<4> {
    let all = qkv.dims()[2];
    assert_eq!(all, heads.total(), "attention with sinks: {heads:?} do not make up the input's {all} heads");
    let PackedHeads { heads: queries, kv_heads } = heads;
    if documents.is_some() || context.is_some_and(|context| context.group.size() > 1) {
        let parts = [(0, queries), (queries, kv_heads), (queries + kv_heads, kv_heads)];
        let parts = parts.map(|(first, count)| qkv.clone().narrow(2, first, count));
        return attention_with_sinks(parts, sinks, options, context, documents, pass);
    }
    check_heads(queries, kv_heads, options);
    assert_eq!(sinks.dims(), [queries], "attention: a sink for each of {queries} heads");
    let operation = PackedSinks { heads, options, attention: pass.attention.clone() };
    apply(operation, [qkv.into_dispatch(), sinks.into_dispatch()])
}

/// The kernels of sinks; the default bodies are the formulas. The log-sum-exp has the layout of the attention kernels.
pub(crate) trait SinkKernels: ContextKernels {
    /// Output and log-sum-exp of keys, with the sinks.
    fn add_sinks(out_lse: OutputLse<Self>, sinks: FloatTensor<Self>) -> OutputLse<Self> {
        with_sinks::<Self>(out_lse, sinks)
    }

    /// The gradient of the sinks from the output and the log-sum-exp with them, and the output's gradient.
    fn sinks_grad(out_lse: &OutputLse<Self>, grad: &FloatTensor<Self>, sinks: FloatTensor<Self>) -> FloatTensor<Self> {
        sinks_grad::<Self>(out_lse, grad, sinks)
    }
}

impl SinkKernels for Flex {}

/// Projection, sinks, output and log-sum-exp.
type Saved<B> = (FloatTensor<B>, FloatTensor<B>, OutputLse<B>, PackedHeads, AttentionOptions);

operation! {
    PackedSinks { heads: PackedHeads, options: AttentionOptions, attention: CoreAttention }, 2, Saved<B>,
    |[qkv, sinks], _, tracked| {
        let saved = tracked.then(|| (qkv.clone(), sinks.clone()));
        let out_lse = attention.run(|| {
            let (out, lse) = B::attention_packed_forward(qkv, heads, options);
            B::add_sinks([out, lse], sinks)
        });
        (out_lse[0].clone(), saved.map(|(qkv, sinks)| (qkv, sinks, out_lse, heads, options)))
    },
    |(qkv, sinks, out_lse, heads, options), grad, parents| {
        let Parents { ops: Ops { parents: [qkv_node, sinks_node], .. }, grads } = parents;
        if let Some(node) = sinks_node {
            deliver::<B>(grads, node.id, B::sinks_grad(&out_lse, &grad, sinks));
        }
        if let Some(node) = qkv_node {
            grads.register::<B>(node.id, B::attention_packed_grad(qkv, out_lse, grad, heads, options));
        }
    },
}
