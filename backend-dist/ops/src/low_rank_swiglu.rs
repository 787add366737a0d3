//! SwiGLU of what a frozen layer and its adapters compute, as one autograd node: their sum, which is as wide as gate and
//! up together, is neither written nor read on GPUs that have a kernel for it.

use burn::backend::{Flex, autodiff::ops::Ops, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::{
    fp8::{Fp8Kernels, KnownAmax},
    gemm::deliver_weight_grad,
    operation::{Parents, apply, operation},
};

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
    apply(LowRankSwiGlu { amax }, [base.into_dispatch(), low.into_dispatch(), b.into_dispatch()])
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

operation! {
    LowRankSwiGlu { amax: AmaxOfSwiGlu }, 3, ([FloatTensor<B>; 3], Option<KnownAmax>),
    |[base, low, b], _, tracked| {
        let saved = tracked.then(|| ([base.clone(), low.clone(), b.clone()], amax.gradient));
        let (out, found) = B::low_rank_swiglu(base, low, b, amax.output.is_some());
        KnownAmax::note::<B>(&amax.output, found);
        (out, saved)
    },
    |([base, low, b], amax), grad, parents| {
        let Parents { ops: Ops { parents: [base_node, low_node, b_node], .. }, grads } = parents;
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
    },
}
