//! SwiGLU of what a frozen layer and its adapters compute, as one autograd node: their sum, which is as wide as gate and
//! up together, is neither written nor read on GPUs that have a kernel for it.

use burn::backend::{
    Autodiff, Backend, Dispatch, Flex,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::FloatTensor,
};
use burn::tensor::Tensor;

use super::{
    fp8::{Fp8Kernels, KnownAmax},
    gemm::deliver_weight_grad,
};
use crate::extension::on_backends;

/// [`swiglu`](super::swiglu) of `base + low · bᵀ` for `base [s, b, 2 f] = [gate | up]`, `low [s, b, r]` and `b [2 f, r]`;
/// output `[s, b, f]`. Layers in FP8 that read the output, and the gradient of `base`, may be given their amax.
///
/// # Panics
///
/// If the sizes do not fit.
pub fn low_rank_swiglu(base: Tensor<3>, low: Tensor<3>, b: Tensor<2>, amax: AmaxOfSwiGlu) -> Tensor<3> {
    let (shape, [positions, samples, inner], of_b) = (base.dims(), low.dims(), b.dims());
    let fits = shape == [positions, samples, of_b[0]] && inner == of_b[1] && of_b[0].is_multiple_of(2);
    assert!(fits, "low_rank_swiglu: {shape:?} + {:?} · {of_b:?}ᵀ", low.dims());
    let (base, low, b) = (base.into_dispatch(), low.into_dispatch(), b.into_dispatch());
    Tensor::from_dispatch(<Dispatch as LowRankSwiGluOps>::op_low_rank_swiglu(base, low, b, amax))
}

/// Whom [`low_rank_swiglu`] tells the amax of what it writes.
#[derive(Clone, Debug, Default)]
pub struct AmaxOfSwiGlu {
    /// Of the output.
    pub output: Option<KnownAmax>,
    /// Of the gradient of `base`.
    pub gradient: Option<KnownAmax>,
}

/// The kernels of [`low_rank_swiglu`]; the default bodies compute the sum first. With `amax` they also return that of the
/// result, if it costs no pass over it.
pub trait LowRankKernels: Fp8Kernels {
    /// `silu(gate) up` of `[gate | up] = base + low · bᵀ`.
    fn low_rank_swiglu(
        base: FloatTensor<Self>,
        low: FloatTensor<Self>,
        b: FloatTensor<Self>,
        amax: bool,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        unfused::<Self>(base, low, b, amax)
    }

    /// The gradient of `base`, given that of the result.
    fn low_rank_swiglu_grad(
        base: FloatTensor<Self>,
        low: FloatTensor<Self>,
        b: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        amax: bool,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        grad_unfused::<Self>(base, low, b, grad, amax)
    }
}

impl LowRankKernels for Flex {}

pub fn unfused<B: Fp8Kernels>(
    base: FloatTensor<B>,
    low: FloatTensor<B>,
    b: FloatTensor<B>,
    amax: bool,
) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
    let out = B::swiglu_forward(B::add_linear_forward(base, low, b));
    (out.clone(), amax.then(|| B::fp8_amax(out)))
}

pub fn grad_unfused<B: Fp8Kernels>(
    base: FloatTensor<B>,
    low: FloatTensor<B>,
    b: FloatTensor<B>,
    grad: FloatTensor<B>,
    amax: bool,
) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
    let grad = B::swiglu_grad(B::add_linear_forward(base, low, b), grad);
    (grad.clone(), amax.then(|| B::fp8_amax(grad)))
}

#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Autodiff)]
trait LowRankSwiGluOps: Backend {
    fn op_low_rank_swiglu(
        base: FloatTensor<Self>,
        low: FloatTensor<Self>,
        b: FloatTensor<Self>,
        amax: AmaxOfSwiGlu,
    ) -> FloatTensor<Self>;
}

/// The output, whose amax is noted.
fn forward<B: LowRankKernels>(
    base: FloatTensor<B>,
    low: FloatTensor<B>,
    b: FloatTensor<B>,
    amax: &AmaxOfSwiGlu,
) -> FloatTensor<B> {
    let (out, found) = B::low_rank_swiglu(base, low, b, amax.output.is_some());
    KnownAmax::note::<B>(&amax.output, found);
    out
}

on_backends! {
    impl LowRankSwiGluOps {
        fn op_low_rank_swiglu(
            base: FloatTensor<Self>,
            low: FloatTensor<Self>,
            b: FloatTensor<Self>,
            amax: AmaxOfSwiGlu,
        ) -> FloatTensor<Self> {
            forward::<Self>(base, low, b, &amax)
        }
    }
}

/// Parents: what the layer computes, the narrow activations, B.
#[derive(Debug)]
struct LowRankSwiGlu;

impl<B: LowRankKernels> Backward<B, 3> for LowRankSwiGlu {
    type State = ([FloatTensor<B>; 3], Option<KnownAmax>);

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let ([base_node, low_node, b_node], ([base, low, b], amax)) = (ops.parents, ops.state);
        let amax = amax.filter(|_| base_node.is_some());
        let (grad, found) = B::low_rank_swiglu_grad(base, low.clone(), b.clone(), grad, amax.is_some());
        KnownAmax::note::<B>(&amax, found);
        if let Some(node) = b_node {
            deliver_weight_grad::<B>(grads, node.id, grad.clone(), low);
        }
        if let Some(node) = low_node {
            grads.register::<B>(node.id, B::linear_input_grad(grad.clone(), b));
        }
        if let Some(node) = base_node {
            grads.register::<B>(node.id, grad);
        }
    }
}

impl<B: LowRankKernels, C: CheckpointStrategy> LowRankSwiGluOps for Autodiff<B, C> {
    fn op_low_rank_swiglu(
        base: FloatTensor<Self>,
        low: FloatTensor<Self>,
        b: FloatTensor<Self>,
        amax: AmaxOfSwiGlu,
    ) -> FloatTensor<Self> {
        let ((base, base_node), (low, low_node), (b, b_node)) = (base.into_parts(), low.into_parts(), b.into_parts());
        let out = |[base, low, b]: [FloatTensor<B>; 3]| forward::<B>(base, low, b, &amax);
        match LowRankSwiGlu.prepare::<C>([base_node, low_node, b_node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let saved = [base, low, b];
                let out = out(saved.clone());
                prep.finish((saved, amax.gradient), out)
            }
            OpsKind::UnTracked(prep) => prep.finish(out([base, low, b])),
        }
    }
}
