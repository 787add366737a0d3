//! Attention with sinks on a packed projection, without context parallelism and documents: its gradient is packed too,
//! and the sinks are one pass over the output.

use burn::backend::{
    Autodiff, Dispatch, Flex, autodiff::checkpoint::strategy::CheckpointStrategy, tensor::FloatTensor,
};
use burn::tensor::Tensor;

use super::kernels::{ContextKernels, OutputLse};
use super::sink_softmax::{sinks_grad, with_sinks};
use super::sinks::attention_with_sinks;
use super::{ContextParallel, Documents};
use crate::attention::check_heads;
use crate::extension::{finish, node, operations};
use crate::main_grads::deliver;
use crate::options::{AttentionOptions, PackedHeads};
use crate::pass::PassContext;
use crate::saved_attention::CoreAttention;

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
    let (qkv, sinks, attention) = (qkv.into_dispatch(), sinks.into_dispatch(), pass.attention.clone());
    Tensor::from_dispatch(<Dispatch as PackedSinkOps>::op_packed_sinks(qkv, sinks, heads, options, attention))
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

fn forward<B: SinkKernels>(
    qkv: FloatTensor<B>,
    sinks: FloatTensor<B>,
    heads: PackedHeads,
    options: AttentionOptions,
    attention: &CoreAttention,
) -> OutputLse<B> {
    attention.run(|| {
        let (out, lse) = B::attention_packed_forward(qkv, heads, options);
        B::add_sinks([out, lse], sinks)
    })
}

operations! {
    trait PackedSinkOps {
        fn op_packed_sinks(
            qkv: FloatTensor<Self>,
            sinks: FloatTensor<Self>,
            heads: PackedHeads,
            options: AttentionOptions,
            attention: CoreAttention,
        ) -> FloatTensor<Self> {
            let [out, _] = forward::<Self>(qkv, sinks, heads, options, &attention);
            out
        }
    }
}

/// Projection, sinks, output and log-sum-exp.
type Saved<B> = (FloatTensor<B>, FloatTensor<B>, OutputLse<B>, PackedHeads, AttentionOptions);

node!(PackedSinks: SinkKernels, 2, Saved<B>, |ops, grad, grads| {
    let ([qkv_node, sinks_node], (qkv, sinks, out_lse, heads, options)) = (ops.parents, ops.state);
    if let Some(node) = sinks_node {
        deliver::<B>(grads, node.id, B::sinks_grad(&out_lse, &grad, sinks));
    }
    if let Some(node) = qkv_node {
        grads.register::<B>(node.id, B::attention_packed_grad(qkv, out_lse, grad, heads, options));
    }
});

// Compute-bound: a checkpointing strategy must never repeat it without the other ranks.
impl<B: SinkKernels, C: CheckpointStrategy> PackedSinkOps for Autodiff<B, C> {
    fn op_packed_sinks(
        qkv: FloatTensor<Self>,
        sinks: FloatTensor<Self>,
        heads: PackedHeads,
        options: AttentionOptions,
        attention: CoreAttention,
    ) -> FloatTensor<Self> {
        let ((qkv, qkv_node), (sinks, sinks_node)) = (qkv.into_parts(), sinks.into_parts());
        let out_lse = forward::<B>(qkv.clone(), sinks.clone(), heads, options, &attention);
        let out = out_lse[0].clone();
        finish!(PackedSinks, [qkv_node, sinks_node], (qkv, sinks, out_lse, heads, options), out)
    }
}
