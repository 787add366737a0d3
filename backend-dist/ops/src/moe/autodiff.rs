//! The operations as backend extensions, and their autograd nodes. All nodes are compute-bound: nothing is replayed.

mod biased;
mod nodes;

use std::marker::PhantomData;
use std::sync::Arc;

use burn::backend::{
    Autodiff,
    autodiff::{
        checkpoint::strategy::CheckpointStrategy,
        ops::{Backward, OpsKind},
    },
    tensor::{FloatTensor, IntTensor},
};

use super::expert_gemms::{ExpertGemms, Plain};
use super::expert_pipeline::{self, ExpertPipeline, SavedPipeline, ThroughExperts};
use super::kernels::MoeKernels;
use crate::blockwise::{Kept, QuantizedWeight};
use crate::extension::{finish, operations};
use crate::fp8::{Fp8Experts, Fp8GroupKernels, Purpose};
use crate::weight_grads::Deferral;
pub(super) use biased::BiasedOps;
use nodes::{GatherRows, GroupedLinear, GroupedSwiGluLinear, Inject, RouterLogits, SavedSwiGlu};

/// Tokens of each group.
type Counts = Arc<[usize]>;

operations! {
    /// One method per public operation; see the functions of [`moe`](super) for what they do.
    pub(super) trait MoeOps {
        fn op_gather_rows(x: FloatTensor<Self>, to: IntTensor<Self>, _back: IntTensor<Self>) -> FloatTensor<Self> {
            Self::sum_rows(x, to)
        }

        fn op_router_logits(x: FloatTensor<Self>, w: FloatTensor<Self>) -> FloatTensor<Self> {
            Self::router_logits(x, w)
        }

        fn op_grouped_linear(
            x: FloatTensor<Self>,
            w: FloatTensor<Self>,
            _stored: Option<QuantizedWeight>,
            counts: Counts,
            _deferral: Deferral,
        ) -> FloatTensor<Self> {
            Self::grouped_forward(x, w, &counts)
        }

        fn op_grouped_swiglu_linear(
            x: FloatTensor<Self>,
            p: FloatTensor<Self>,
            w: FloatTensor<Self>,
            _stored: Option<QuantizedWeight>,
            counts: Counts,
            _recompute: bool,
            _deferral: Deferral,
        ) -> FloatTensor<Self> {
            Self::grouped_forward(Self::weighted_swiglu(x, p), w, &counts)
        }

        fn op_through_experts(
            x: FloatTensor<Self>,
            p: FloatTensor<Self>,
            gate_up: FloatTensor<Self>,
            down: FloatTensor<Self>,
            pipeline: Arc<ExpertPipeline>,
            _recompute: bool,
        ) -> FloatTensor<Self> {
            let (weights, purposes) = ([&gate_up, &down], [Purpose::Evaluate; 2]);
            match &pipeline.fp8 {
                None => expert_pipeline::forward::<Self, _>(x, p, &[Plain; 2], weights, &pipeline, purposes).0,
                Some(fp8) => expert_pipeline::forward::<Self, _>(x, p, fp8, weights, &pipeline, purposes).0,
            }
        }

        fn op_inject(x: FloatTensor<Self>, _loss: FloatTensor<Self>, _scale: f64) -> FloatTensor<Self> {
            x
        }
    }
}

/// [`expert_pipeline`] with its node: `x`, `p`, and the weights of both layers.
fn through_experts<B: MoeKernels, C: CheckpointStrategy, P: ExpertGemms<B>>(
    inputs: [FloatTensor<Autodiff<B, C>>; 4],
    layers: [P; 2],
    pipeline: Arc<ExpertPipeline>,
    recompute: bool,
) -> FloatTensor<Autodiff<B, C>> {
    let tracked = inputs.each_ref().map(|input| input.is_tracked());
    let purpose = |keep| if tracked.contains(&true) { Purpose::Train { keep } } else { Purpose::Evaluate };
    let purposes = [purpose(tracked[2]), purpose(tracked[3] && !recompute)];
    let [(x, x_node), (p, p_node), (gate_up, first_node), (down, second_node)] = inputs.map(|input| input.into_parts());
    let nodes = [x_node, p_node, first_node, second_node];
    let (y, chunks) = expert_pipeline::forward::<B, P>(x, p, &layers, [&gate_up, &down], &pipeline, purposes);
    finish!(
        ThroughExperts::<P>(PhantomData),
        nodes,
        SavedPipeline { chunks, layers, weights: [gate_up, down], pipeline },
        y,
    )
}

impl<B: MoeKernels + Fp8GroupKernels, C: CheckpointStrategy> MoeOps for Autodiff<B, C> {
    fn op_gather_rows(x: FloatTensor<Self>, to: IntTensor<Self>, back: IntTensor<Self>) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        finish!(GatherRows, [node], back, B::sum_rows(x, to))
    }

    fn op_router_logits(x: FloatTensor<Self>, w: FloatTensor<Self>) -> FloatTensor<Self> {
        let ((x, x_node), (w, w_node)) = (x.into_parts(), w.into_parts());
        finish!(RouterLogits, [x_node, w_node], [x.clone(), w.clone()], B::router_logits(x, w))
    }

    fn op_grouped_linear(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        stored: Option<QuantizedWeight>,
        counts: Counts,
        deferral: Deferral,
    ) -> FloatTensor<Self> {
        let tracked = [x.is_tracked(), w.is_tracked()];
        let ((x, x_node), (w, w_node)) = (x.into_parts(), w.into_parts());
        match GroupedLinear.prepare::<C>([x_node, w_node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let kept = tracked[0].then(|| Kept::of(&w, stored));
                let saved = (tracked[1].then(|| x.clone()), kept, counts.clone(), deferral);
                prep.finish(saved, B::grouped_forward(x, w, &counts))
            }
            OpsKind::UnTracked(prep) => prep.finish(B::grouped_forward(x, w, &counts)),
        }
    }

    fn op_grouped_swiglu_linear(
        x: FloatTensor<Self>,
        p: FloatTensor<Self>,
        w: FloatTensor<Self>,
        stored: Option<QuantizedWeight>,
        counts: Counts,
        recompute: bool,
        deferral: Deferral,
    ) -> FloatTensor<Self> {
        let keep = w.is_tracked() && !recompute;
        let ((x, x_node), (p, p_node), (w, w_node)) = (x.into_parts(), p.into_parts(), w.into_parts());
        match GroupedSwiGluLinear.prepare::<C>([x_node, p_node, w_node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let input = B::weighted_swiglu(x.clone(), p.clone());
                let kept = keep.then(|| input.clone());
                let saved =
                    SavedSwiGlu { x, p, input: kept, w: Kept::of(&w, stored), counts: counts.clone(), deferral };
                prep.finish(saved, B::grouped_forward(input, w, &counts))
            }
            OpsKind::UnTracked(prep) => prep.finish(B::grouped_forward(B::weighted_swiglu(x, p), w, &counts)),
        }
    }

    fn op_through_experts(
        x: FloatTensor<Self>,
        p: FloatTensor<Self>,
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        pipeline: Arc<ExpertPipeline>,
        recompute: bool,
    ) -> FloatTensor<Self> {
        let inputs = [x, p, gate_up, down];
        match pipeline.fp8.clone() {
            None => through_experts::<B, C, _>(inputs, [Plain; 2], pipeline, recompute),
            Some(fp8) => through_experts::<B, C, Fp8Experts>(inputs, fp8, pipeline, recompute),
        }
    }

    fn op_inject(x: FloatTensor<Self>, loss: FloatTensor<Self>, scale: f64) -> FloatTensor<Self> {
        let ((x, x_node), (loss, loss_node)) = (x.into_parts(), loss.into_parts());
        finish!(Inject, [x_node, loss_node], (scale, loss), x)
    }
}
