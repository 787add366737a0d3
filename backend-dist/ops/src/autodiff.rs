//! The autograd nodes: what each operation saves for backward and which gradients it computes.
//!
//! Every node is compute-bound: its inputs are saved and nothing is replayed, so a checkpointing strategy never repeats
//! a forward.

use burn::backend::{
    Autodiff, TensorMetadata,
    autodiff::{
        checkpoint::strategy::CheckpointStrategy,
        ops::{Backward, OpsKind},
    },
    tensor::{FloatTensor, IntTensor},
};

use super::{
    dropout_mask::DropoutMask,
    gemm::deliver_weight_grad,
    kernels::{LocalKernels, NormGrads, NormNeeds},
    local::LocalOps,
    main_grads::{deliver, main_grad},
    options::{AttentionOptions, GeluKind, PackedHeads, Rotation},
    plain,
    saved_attention::CoreAttention,
};
use crate::extension::{finish, node};

node!(RmsNorm: LocalKernels, 2, (FloatTensor<B>, FloatTensor<B>, f64), |ops, grad, grads| {
    let ([x_node, w_node], (x, w, eps)) = (ops.parents, ops.state);
    let needs = NormNeeds { x: x_node.is_some(), w: w_node.is_some(), b: false };
    let NormGrads { x, w, b: _ } = B::rms_norm_grads(x, w, grad, eps, needs);
    for (node, value) in [(x_node, x), (w_node, w)] {
        if let (Some(node), Some(value)) = (node, value) {
            deliver::<B>(grads, node.id, value);
        }
    }
});

node!(LayerNorm: LocalKernels, 3, (FloatTensor<B>, FloatTensor<B>, f64), |ops, grad, grads| {
    let ([x_node, w_node, b_node], (x, w, eps)) = (ops.parents, ops.state);
    let needs = NormNeeds { x: x_node.is_some(), w: w_node.is_some(), b: b_node.is_some() };
    let NormGrads { x, w, b } = B::layer_norm_grads(x, w, grad, eps, needs);
    for (node, value) in [(x_node, x), (w_node, w), (b_node, b)] {
        if let (Some(node), Some(value)) = (node, value) {
            deliver::<B>(grads, node.id, value);
        }
    }
});

node!(Rope: LocalKernels, 1, (FloatTensor<B>, FloatTensor<B>, usize), |ops, grad, grads| {
    let ([node], (cos, sin, heads)) = (ops.parents, ops.state);
    if let Some(node) = node {
        grads.register::<B>(node.id, B::rope_apply(grad, cos, sin, heads, Rotation::Back));
    }
});

node!(SwiGlu: LocalKernels, 1, FloatTensor<B>, |ops, grad, grads| {
    if let [Some(node)] = ops.parents {
        grads.register::<B>(node.id, B::swiglu_grad(ops.state, grad));
    }
});

node!(Gelu: LocalKernels, 1, (FloatTensor<B>, GeluKind), |ops, grad, grads| {
    if let ([Some(node)], (x, kind)) = (ops.parents, ops.state) {
        grads.register::<B>(node.id, B::gelu_grad(x, grad, kind));
    }
});

node!(GeGlu: LocalKernels, 1, (FloatTensor<B>, GeluKind), |ops, grad, grads| {
    if let ([Some(node)], (x, kind)) = (ops.parents, ops.state) {
        grads.register::<B>(node.id, B::geglu_grad(x, grad, kind));
    }
});

node!(SquaredRelu: LocalKernels, 1, FloatTensor<B>, |ops, grad, grads| {
    if let [Some(node)] = ops.parents {
        grads.register::<B>(node.id, B::squared_relu_grad(ops.state, grad));
    }
});

// The state is the output.
node!(Softcap: LocalKernels, 1, (FloatTensor<B>, f64), |ops, grad, grads| {
    if let ([Some(node)], (capped, cap)) = (ops.parents, ops.state) {
        grads.register::<B>(node.id, plain::activation::softcap_grad::<B>(capped, grad, cap));
    }
});

node!(Attention: LocalKernels, 3, ([FloatTensor<B>; 3], [FloatTensor<B>; 2], AttentionOptions), |ops, grad, grads| {
    let (qkv, result, options) = ops.state;
    for (node, value) in ops.parents.into_iter().zip(B::attention_grads(qkv, result, grad, options)) {
        if let Some(node) = node {
            grads.register::<B>(node.id, value);
        }
    }
});

node!(
    AttentionPacked: LocalKernels, 1, (FloatTensor<B>, [FloatTensor<B>; 2], PackedHeads, AttentionOptions),
    |ops, grad, grads| {
        let (qkv, result, heads, options) = ops.state;
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, B::attention_packed_grad(qkv, result, grad, heads, options));
        }
    }
);

node!(Embedding: LocalKernels, 1, (IntTensor<B>, usize, usize), |ops, grad, grads| {
    let (ids, first_row, rows) = ops.state;
    if let [Some(node)] = ops.parents {
        match main_grad::<B>(node.id) {
            Some((sum, add)) => B::embedding_accumulate_weight_grad(grad, ids, first_row, rows, &sum, add),
            None => grads.register::<B>(node.id, B::embedding_weight_grad(grad, ids, first_row, rows)),
        }
    }
});

node!(Dropout: LocalKernels, 1, (f64, DropoutMask), |ops, grad, grads| {
    let (p, key) = ops.state;
    if let [Some(node)] = ops.parents {
        grads.register::<B>(node.id, B::dropout_apply(grad, p, &key));
    }
});

node!(AddBias: LocalKernels, 2, (), |ops, grad, grads| {
    let [x_node, b_node] = ops.parents;
    if let Some(node) = b_node {
        deliver::<B>(grads, node.id, B::bias_grad(grad.clone()));
    }
    if let Some(node) = x_node {
        grads.register::<B>(node.id, grad);
    }
});

node!(AddLinear: LocalKernels, 3, (FloatTensor<B>, FloatTensor<B>), |ops, grad, grads| {
    let ([y_node, x_node, w_node], (x, w)) = (ops.parents, ops.state);
    if let Some(node) = w_node {
        deliver_weight_grad::<B>(grads, node.id, grad.clone(), x);
    }
    if let Some(node) = x_node {
        grads.register::<B>(node.id, B::linear_input_grad(grad.clone(), w));
    }
    if let Some(node) = y_node {
        grads.register::<B>(node.id, grad);
    }
});

impl<B: LocalKernels, C: CheckpointStrategy> LocalOps for Autodiff<B, C> {
    fn op_rms_norm(x: FloatTensor<Self>, w: FloatTensor<Self>, eps: f64) -> FloatTensor<Self> {
        let ((x, x_node), (w, w_node)) = (x.into_parts(), w.into_parts());
        finish!(RmsNorm, [x_node, w_node], (x.clone(), w.clone(), eps), B::rms_norm_forward(x, w, eps))
    }

    fn op_layer_norm(x: FloatTensor<Self>, w: FloatTensor<Self>, b: FloatTensor<Self>, eps: f64) -> FloatTensor<Self> {
        let ((x, x_node), (w, w_node), (b, b_node)) = (x.into_parts(), w.into_parts(), b.into_parts());
        finish!(LayerNorm, [x_node, w_node, b_node], (x.clone(), w.clone(), eps), B::layer_norm_forward(x, w, b, eps))
    }

    fn op_rope(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        heads: usize,
    ) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        let (cos, sin) = (cos.into_primitive(), sin.into_primitive());
        finish!(Rope, [node], (cos.clone(), sin.clone(), heads), B::rope_apply(x, cos, sin, heads, Rotation::Forward))
    }

    fn op_swiglu(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        finish!(SwiGlu, [node], x.clone(), B::swiglu_forward(x))
    }

    fn op_gelu(x: FloatTensor<Self>, kind: GeluKind) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        finish!(Gelu, [node], (x.clone(), kind), B::gelu_forward(x, kind))
    }

    fn op_geglu(x: FloatTensor<Self>, kind: GeluKind) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        finish!(GeGlu, [node], (x.clone(), kind), B::geglu_forward(x, kind))
    }

    fn op_squared_relu(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        finish!(SquaredRelu, [node], x.clone(), B::squared_relu_forward(x))
    }

    fn op_softcap(x: FloatTensor<Self>, cap: f64) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        let capped = plain::activation::softcap::<B>(x, cap);
        finish!(Softcap, [node], (capped.clone(), cap), capped)
    }

    fn op_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        options: AttentionOptions,
        attention: CoreAttention,
    ) -> FloatTensor<Self> {
        let ((q, q_node), (k, k_node), (v, v_node)) = (q.into_parts(), k.into_parts(), v.into_parts());
        match Attention.prepare::<C>([q_node, k_node, v_node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let (out, lse) = attention.run(|| B::attention_forward(q.clone(), k.clone(), v.clone(), options));
                prep.finish(([q, k, v], [out.clone(), lse], options), out)
            }
            OpsKind::UnTracked(prep) => prep.finish(attention.run(|| B::attention_forward(q, k, v, options)).0),
        }
    }

    fn op_attention_packed(
        qkv: FloatTensor<Self>,
        heads: PackedHeads,
        options: AttentionOptions,
        attention: CoreAttention,
    ) -> FloatTensor<Self> {
        let (qkv, node) = qkv.into_parts();
        match AttentionPacked.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let (out, lse) = attention.run(|| B::attention_packed_forward(qkv.clone(), heads, options));
                prep.finish((qkv, [out.clone(), lse], heads, options), out)
            }
            OpsKind::UnTracked(prep) => {
                prep.finish(attention.run(|| B::attention_packed_forward(qkv, heads, options)).0)
            }
        }
    }

    fn op_embedding(w: FloatTensor<Self>, ids: IntTensor<Self>, first_row: usize) -> FloatTensor<Self> {
        let (w, node) = w.into_parts();
        finish!(Embedding, [node], (ids.clone(), first_row, w.shape()[0]), B::embedding_forward(w, ids, first_row))
    }

    fn op_dropout(x: FloatTensor<Self>, p: f64, key: DropoutMask) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        match Dropout.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let out = B::dropout_apply(x, p, &key);
                prep.finish((p, key), out)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::dropout_apply(x, p, &key)),
        }
    }

    fn op_add_bias(x: FloatTensor<Self>, b: FloatTensor<Self>) -> FloatTensor<Self> {
        let ((x, x_node), (b, b_node)) = (x.into_parts(), b.into_parts());
        let y = plain::linear::add_bias::<B>(x, b);
        finish!(AddBias, [x_node, b_node], (), y)
    }

    fn op_add_linear(y: FloatTensor<Self>, x: FloatTensor<Self>, w: FloatTensor<Self>) -> FloatTensor<Self> {
        let ((y, y_node), (x, x_node), (w, w_node)) = (y.into_parts(), x.into_parts(), w.into_parts());
        finish!(AddLinear, [y_node, x_node, w_node], (x.clone(), w.clone()), B::add_linear_forward(y, x, w))
    }
}
