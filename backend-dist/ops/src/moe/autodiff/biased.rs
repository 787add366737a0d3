//! The second layer of experts with biases behind their clamped SwiGLU (gpt-oss), as one node.

use burn::backend::{
    Autodiff, TensorMetadata,
    autodiff::{
        checkpoint::strategy::CheckpointStrategy,
        ops::{Backward, OpsKind},
    },
    tensor::FloatTensor,
};

use super::super::biased::ClampedSwiGlu;
use super::super::kernels::{BiasKernels, MoeKernels};
use super::super::plain::cast;
use super::Counts;
use super::nodes::weight_grad;
use crate::blockwise::{Kept, QuantizedWeight};
use crate::extension::{node, operations};
use crate::fp8::Fp8Kernels;
use crate::main_grads::main_grad;
use crate::weight_grads::Deferral;

operations! {
    pub(in crate::moe) trait BiasedOps {
        fn op_grouped_clamped_linear(
            x: FloatTensor<Self>,
            p: FloatTensor<Self>,
            w: FloatTensor<Self>,
            first: FloatTensor<Self>,
            second: FloatTensor<Self>,
            _stored: Option<QuantizedWeight>,
            act: ClampedSwiGlu,
            counts: Counts,
            _recompute: bool,
            _deferral: Deferral,
        ) -> FloatTensor<Self> {
            let input = Self::clamped_swiglu(x, first, p.clone(), &counts, act);
            Self::add_weighted_bias(Self::grouped_forward(input, w, &counts), second, p, &counts)
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct SavedBiased<B: MoeKernels> {
    x: FloatTensor<B>,
    p: FloatTensor<B>,
    biases: [FloatTensor<B>; 2],
    /// The GEMM's input if the weight needs a gradient; `None` also if it is recomputed.
    input: Option<FloatTensor<B>>,
    w: Kept<B>,
    act: ClampedSwiGlu,
    counts: Counts,
    deferral: Deferral,
}

// Parents: the first layer's output, the probabilities, the second layer's weight, both biases.
node!(GroupedClampedLinear: BiasKernels + Fp8Kernels, 5, SavedBiased<B>, |ops, grad, grads| {
    let SavedBiased { x, p, biases: [first, second], input, w, act, counts, deferral } = ops.state;
    let [x_node, p_node, w_node, first_node, second_node] = ops.parents;
    if let Some(node) = w_node {
        let again = || B::clamped_swiglu(x.clone(), first.clone(), p.clone(), &counts, act);
        let input = input.unwrap_or_else(again);
        weight_grad::<B>((node.id, deferral.of(node.order)), grad.clone(), input, counts.clone(), grads);
    }
    let dtypes = [first.dtype(), second.dtype()];
    let of_input = B::grouped_input_grad(grad.clone(), w.value(), &counts);
    let [x_grad, first_grad, p_grad] = B::clamped_swiglu_grads([x, first, p.clone()], of_input, &counts, act);
    let [second_grad, p_grad] = B::weighted_bias_grads(grad, second, p, p_grad, &counts);
    for ((node, value), dtype) in [(first_node, first_grad), (second_node, second_grad)].into_iter().zip(dtypes) {
        match node.map(|node| (node.id, main_grad::<B>(node.id))) {
            Some((_, Some((sum, add)))) => B::accumulate(value, &sum, add),
            Some((id, None)) => grads.register::<B>(id, cast::<B>(value, dtype)),
            None => {}
        }
    }
    for (node, value) in [(x_node, x_grad), (p_node, p_grad)] {
        if let Some(node) = node {
            grads.register::<B>(node.id, value);
        }
    }
});

impl<B: BiasKernels + Fp8Kernels, C: CheckpointStrategy> BiasedOps for Autodiff<B, C> {
    fn op_grouped_clamped_linear(
        x: FloatTensor<Self>,
        p: FloatTensor<Self>,
        w: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        stored: Option<QuantizedWeight>,
        act: ClampedSwiGlu,
        counts: Counts,
        recompute: bool,
        deferral: Deferral,
    ) -> FloatTensor<Self> {
        let keep = w.is_tracked() && !recompute;
        let ((x, x_node), (p, p_node), (w, w_node)) = (x.into_parts(), p.into_parts(), w.into_parts());
        let ((first, first_node), (second, second_node)) = (first.into_parts(), second.into_parts());
        let nodes = [x_node, p_node, w_node, first_node, second_node];
        let input = B::clamped_swiglu(x.clone(), first.clone(), p.clone(), &counts, act);
        let kept = keep.then(|| input.clone());
        let y = B::grouped_forward(input, w.clone(), &counts);
        let y = B::add_weighted_bias(y, second.clone(), p.clone(), &counts);
        match GroupedClampedLinear.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let (w, biases) = (Kept::of(&w, stored), [first, second]);
                prep.finish(SavedBiased { x, p, biases, input: kept, w, act, counts, deferral }, y)
            }
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}
