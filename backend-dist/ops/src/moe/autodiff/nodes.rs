//! The nodes: what each saves for backward, and its backward pass.

use burn::backend::{
    FloatDType, Scalar, Shape, TensorMetadata,
    autodiff::{NodeId, grads::Gradients},
    tensor::{FloatTensor, IntTensor},
};

use super::super::kernels::MoeKernels;
use super::super::plain::cast;
use super::Counts;
use crate::blockwise::Kept;
use crate::extension::node;
use crate::fp8::Fp8Kernels;
use crate::main_grads::main_grad;
use crate::weight_grads::Deferral;

node!(pub(super) GatherRows: MoeKernels, 1, IntTensor<B>, |ops, grad, grads| {
    if let [Some(node)] = ops.parents {
        grads.register::<B>(node.id, B::sum_rows(grad, ops.state));
    }
});

node!(pub(super) RouterLogits: MoeKernels, 2, [FloatTensor<B>; 2], |ops, grad, grads| {
    let ([x_node, w_node], [x, w]) = (ops.parents, ops.state);
    let dtype = w.dtype();
    let [dx, dw] = B::router_logits_grads(x, w, grad, [x_node.is_some(), w_node.is_some()]);
    if let Some((node, value)) = w_node.zip(dw) {
        match main_grad::<B>(node.id) {
            Some((sum, add)) => B::accumulate(value, &sum, add),
            None => grads.register::<B>(node.id, cast::<B>(value, dtype)),
        }
    }
    if let Some((node, value)) = x_node.zip(dx) {
        grads.register::<B>(node.id, value);
    }
});

/// Delivers the weight's gradient, now or deferred.
pub(super) fn weight_grad<B: MoeKernels>(
    (id, deferral): (NodeId, Deferral),
    grad: FloatTensor<B>,
    x: FloatTensor<B>,
    counts: Counts,
    grads: &mut Gradients,
) {
    deferral.run(grads, move |grads| match main_grad::<B>(id) {
        Some((sum, add)) => B::grouped_accumulate_weight_grad(grad, x, &counts, &sum, add),
        None => grads.register::<B>(id, B::grouped_weight_grad(grad, x, &counts)),
    });
}

// Saves the input if the weight needs a gradient, the weight if the input does.
node!(
    pub(super) GroupedLinear: MoeKernels + Fp8Kernels, 2, (Option<FloatTensor<B>>, Option<Kept<B>>, Counts, Deferral),
    |ops, grad, grads| {
        let ([x_node, w_node], (x, w, counts, deferral)) = (ops.parents, ops.state);
        if let (Some(node), Some(x)) = (w_node, x) {
            weight_grad::<B>((node.id, deferral.of(node.order)), grad.clone(), x, counts.clone(), grads);
        }
        if let (Some(node), Some(w)) = (x_node, w) {
            grads.register::<B>(node.id, B::grouped_input_grad(grad, w.value(), &counts));
        }
    }
);

/// Saved by a grouped layer after a SwiGLU.
#[derive(Clone, Debug)]
pub(super) struct SavedSwiGlu<B: MoeKernels> {
    pub x: FloatTensor<B>,
    pub p: FloatTensor<B>,
    /// The GEMM's input if the weight needs a gradient; `None` also if it is recomputed.
    pub input: Option<FloatTensor<B>>,
    pub w: Kept<B>,
    pub counts: Counts,
    pub deferral: Deferral,
}

node!(pub(super) GroupedSwiGluLinear: MoeKernels + Fp8Kernels, 3, SavedSwiGlu<B>, |ops, grad, grads| {
    let ([x_node, p_node, w_node], SavedSwiGlu { x, p, input, w, counts, deferral }) = (ops.parents, ops.state);
    if let Some(node) = w_node {
        let input = input.unwrap_or_else(|| B::weighted_swiglu(x.clone(), p.clone()));
        weight_grad::<B>((node.id, deferral.of(node.order)), grad.clone(), input, counts.clone(), grads);
    }
    if x_node.is_none() && p_node.is_none() {
        return;
    }
    let [x_grad, p_grad] = B::weighted_swiglu_grads(x, p, B::grouped_input_grad(grad, w.value(), &counts));
    for (node, value) in [(x_node, x_grad), (p_node, p_grad)] {
        if let Some(node) = node {
            grads.register::<B>(node.id, value);
        }
    }
});

// Saves the gradient of the loss, and the loss for its device and type.
node!(pub(super) Inject: MoeKernels, 2, (f64, FloatTensor<B>), |ops, grad, grads| {
    let ([x_node, loss_node], (scale, loss)) = (ops.parents, ops.state);
    if let Some(node) = x_node {
        grads.register::<B>(node.id, grad);
    }
    if let Some(node) = loss_node {
        let dtype = FloatDType::from(loss.dtype());
        let value = B::float_full(Shape::from([1]), Scalar::Float(scale), &loss.device(), dtype);
        grads.register::<B>(node.id, value);
    }
});
