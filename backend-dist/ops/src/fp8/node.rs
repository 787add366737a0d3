//! FP8 GEMMs of an MoE layer's experts: the public operations, as backend extensions, and their autograd nodes.

use std::sync::Arc;

use burn::backend::{
    Autodiff, Dispatch,
    autodiff::{
        checkpoint::strategy::CheckpointStrategy,
        ops::{Backward, OpsKind},
    },
    tensor::FloatTensor,
};
use burn::tensor::{DType, Tensor};

use super::experts::{self, Fp8Experts, Weight};
use super::groups::Fp8GroupKernels;
use super::linear::{MULTIPLE, Purpose};
use crate::extension::{node, operations};
use crate::moe::MoeKernels;

/// [`moe::grouped_linear`](crate::moe::grouped_linear) in FP8, with several groups of tokens for each of the
/// experts of `layer`: `counts` has the groups of the first expert, then as many of the next. Each group has its own
/// scale.
///
/// # Panics
/// If the shapes do not fit, or a group's tokens, the inputs or the outputs are no multiple of [`MULTIPLE`].
pub fn grouped_linear(x: Tensor<2>, w: Tensor<2>, counts: &Arc<[usize]>, layer: &Fp8Experts) -> Tensor<2> {
    check(x.dims(), w.dims(), counts, layer);
    let (x, w) = (x.into_dispatch(), w.into_dispatch());
    Tensor::from_dispatch(<Dispatch as Fp8ExpertOps>::op_fp8_grouped(x, w, counts.clone(), layer.clone()))
}

/// [`moe::grouped_swiglu_linear`](crate::moe::grouped_swiglu_linear) in FP8, with groups as [`grouped_linear`].
///
/// # Panics
/// As [`grouped_linear`], or if the types do not fit.
pub fn grouped_swiglu_linear(
    x: Tensor<2>,
    p: Tensor<1>,
    w: Tensor<2>,
    counts: &Arc<[usize]>,
    recompute: bool,
    layer: &Fp8Experts,
) -> Tensor<2> {
    let [rows, double] = x.dims();
    assert!(double.is_multiple_of(2), "grouped_swiglu_linear: {double} features are not [gate | up]");
    assert_eq!(p.dims(), [rows], "grouped_swiglu_linear: a probability for each of {rows} rows");
    let wide = if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    assert_eq!(p.dtype(), wide, "grouped_swiglu_linear: the type of the probabilities of {:?}", x.dtype());
    check([rows, double / 2], w.dims(), counts, layer);
    let (x, p, w) = (x.into_dispatch(), p.into_dispatch(), w.into_dispatch());
    let y = <Dispatch as Fp8ExpertOps>::op_fp8_grouped_swiglu(
        x,
        p,
        w,
        counts.clone(),
        Recompute { recompute },
        layer.clone(),
    );
    Tensor::from_dispatch(y)
}

fn check([rows, inner]: [usize; 2], w: [usize; 2], counts: &[usize], layer: &Fp8Experts) {
    let experts = layer.count();
    assert!(
        !counts.is_empty()
            && counts.len().is_multiple_of(experts)
            && w[0].is_multiple_of(MULTIPLE * experts)
            && w[1] == inner
            && inner.is_multiple_of(MULTIPLE),
        "FP8 experts: weight {w:?} of {experts} experts for {} groups of tokens of {inner} features; outputs and inputs must \
         be multiples of {MULTIPLE}",
        counts.len()
    );
    assert!(
        rows > 0 && counts.iter().sum::<usize>() == rows && counts.iter().all(|count| count.is_multiple_of(MULTIPLE)),
        "FP8 experts: groups {counts:?} of {rows} tokens must add up to them in multiples of {MULTIPLE}; pad with zeros"
    );
}

/// Tokens of each group.
type Counts = Arc<[usize]>;

/// Whether the input of the GEMM is recomputed in the backward pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recompute {
    recompute: bool,
}

operations! {
    pub(super) trait Fp8ExpertOps {
        fn op_fp8_grouped(
            x: FloatTensor<Self>,
            w: FloatTensor<Self>,
            counts: Counts,
            layer: Fp8Experts,
        ) -> FloatTensor<Self> {
            experts::forward::<Self>(&layer, x, w, &counts, Purpose::Evaluate).0
        }

        fn op_fp8_grouped_swiglu(
            x: FloatTensor<Self>,
            p: FloatTensor<Self>,
            w: FloatTensor<Self>,
            counts: Counts,
            _recompute: Recompute,
            layer: Fp8Experts,
        ) -> FloatTensor<Self> {
            let input = Self::weighted_swiglu(x, p);
            experts::forward::<Self>(&layer, input, w, &counts, Purpose::Evaluate).0
        }
    }
}

/// Saved by a node for backward; `swiglu` are the operands of the activation before the GEMM.
#[derive(Clone, Debug)]
struct State<B: MoeKernels, S> {
    layer: Fp8Experts,
    counts: Counts,
    saved: experts::SavedExperts<B>,
    w: FloatTensor<B>,
    swiglu: S,
}

node!(GroupedLinear: MoeKernels + Fp8GroupKernels, 2, State<B, ()>, |ops, grad, grads| {
    let ([x_node, w_node], State { layer, counts, saved, w, .. }) = (ops.parents, ops.state);
    let weight =
        w_node.map(|node| Weight { id: node.id, deferral: layer.pass.weight_grads.of(node.order), input: None });
    let w = x_node.is_some().then_some(w);
    let x_grad = experts::backward::<B>(&layer, saved, grad, w, weight, &counts, grads);
    if let (Some(node), Some(value)) = (x_node, x_grad) {
        grads.register::<B>(node.id, value);
    }
});

node!(GroupedSwiGluLinear: MoeKernels + Fp8GroupKernels, 3, State<B, SwiGlu<B>>, |ops, grad, grads| {
    let ([x_node, p_node, w_node], State { layer, counts, saved, w, swiglu }) = (ops.parents, ops.state);
    let SwiGlu { x, p, recompute } = swiglu;
    let weight = w_node.map(|node| {
        let input = recompute.then(|| B::weighted_swiglu(x.clone(), p.clone()));
        Weight { id: node.id, deferral: layer.pass.weight_grads.of(node.order), input }
    });
    let w = (x_node.is_some() || p_node.is_some()).then_some(w);
    let Some(grad) = experts::backward::<B>(&layer, saved, grad, w, weight, &counts, grads) else { return };
    let [x_grad, p_grad] = B::weighted_swiglu_grads(x, p, grad);
    for (node, value) in [(x_node, x_grad), (p_node, p_grad)] {
        if let Some(node) = node {
            grads.register::<B>(node.id, value);
        }
    }
});

/// The operands of an activation, and whether it is recomputed.
#[derive(Clone, Debug)]
struct SwiGlu<B: MoeKernels> {
    x: FloatTensor<B>,
    p: FloatTensor<B>,
    recompute: bool,
}

impl<B: MoeKernels + Fp8GroupKernels + Fp8ExpertOps, C: CheckpointStrategy> Fp8ExpertOps for Autodiff<B, C> {
    fn op_fp8_grouped(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        counts: Counts,
        layer: Fp8Experts,
    ) -> FloatTensor<Self> {
        let purpose = Purpose::Train { keep: w.is_tracked() };
        let ((x, x_node), (w, w_node)) = (x.into_parts(), w.into_parts());
        match GroupedLinear.prepare::<C>([x_node, w_node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let (y, saved) = experts::forward::<B>(&layer, x, w.clone(), &counts, purpose);
                prep.finish(State { layer, counts, saved, w, swiglu: () }, y)
            }
            OpsKind::UnTracked(prep) => prep.finish(experts::forward::<B>(&layer, x, w, &counts, Purpose::Evaluate).0),
        }
    }

    fn op_fp8_grouped_swiglu(
        x: FloatTensor<Self>,
        p: FloatTensor<Self>,
        w: FloatTensor<Self>,
        counts: Counts,
        Recompute { recompute }: Recompute,
        layer: Fp8Experts,
    ) -> FloatTensor<Self> {
        let purpose = Purpose::Train { keep: w.is_tracked() && !recompute };
        let ((x, x_node), (p, p_node), (w, w_node)) = (x.into_parts(), p.into_parts(), w.into_parts());
        let input = B::weighted_swiglu(x.clone(), p.clone());
        match GroupedSwiGluLinear.prepare::<C>([x_node, p_node, w_node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let (y, saved) = experts::forward::<B>(&layer, input, w.clone(), &counts, purpose);
                prep.finish(State { layer, counts, saved, w, swiglu: SwiGlu { x, p, recompute } }, y)
            }
            OpsKind::UnTracked(prep) => {
                prep.finish(experts::forward::<B>(&layer, input, w, &counts, Purpose::Evaluate).0)
            }
        }
    }
}
