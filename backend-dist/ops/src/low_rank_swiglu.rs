//! SwiGLU of what a frozen layer and its adapters compute, as one autograd node: their sum, which is as wide as gate and
//! up together, is neither written nor read on GPUs that have a kernel for it.

use burn::backend::{Flex, autodiff::ops::Ops, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::{
    fp8::{Fp8Kernels, KnownAmax},
    operation::{Parents, apply, operation},
    shared_input::{LeftGemm, SharedInput, with_added},
    tensor_parallel::gemm::deliver_weight_grad,
};

/// [`swiglu`](super::swiglu) of `base + low · bᵀ` for `base [s, b, 2 f] = [gate | up]`, `low [s, b, r]` and `b [2 f, r]`;
/// output `[s, b, f]`.
///
/// # Panics
///
/// If the sizes do not fit.
pub fn low_rank_swiglu(base: Tensor<3>, low: Tensor<3>, b: Tensor<2>, neighbours: SwiGluNeighbours) -> Tensor<3> {
    let (shape, [positions, samples, inner], of_b) = (base.dims(), low.dims(), b.dims());
    let fits = shape == [positions, samples, of_b[0]] && inner == of_b[1] && of_b[0].is_multiple_of(2);
    assert!(fits, "low_rank_swiglu: {shape:?} + {:?} · {of_b:?}ᵀ", low.dims());
    apply(LowRankSwiGlu { neighbours }, [base.into_dispatch(), low.into_dispatch(), b.into_dispatch()])
}

/// What [`low_rank_swiglu`] and the layers before and behind it tell each other.
#[derive(Clone, Debug, Default)]
pub struct SwiGluNeighbours {
    /// The layer behind is in FP8 and is told the amax of the output.
    pub output_amax: Option<KnownAmax>,
    /// The layer before is in FP8 and is told the amax of the gradient of `base`.
    pub gradient_amax: Option<KnownAmax>,
    /// The output's two readers, an adapter and a frozen weight, of which the adapter leaves its GEMM to the gradient
    /// of this operation ([`SharedInput::added_by_writer`]).
    pub readers: Option<SharedInput>,
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

    /// The gradient of `base`, given that of the result, to which a GEMM that was left is added.
    fn low_rank_swiglu_grad(
        operands: [FloatTensor<Self>; 3],
        grad: FloatTensor<Self>,
        left: Option<LeftGemm<Self>>,
        amax: bool,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        grad_unfused::<Self>(operands, grad, left, amax)
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
    [base, low, b]: [FloatTensor<B>; 3],
    grad: FloatTensor<B>,
    left: Option<LeftGemm<B>>,
    amax: bool,
) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
    let grad = with_added::<B>(grad, left);
    let grad = B::swiglu_grad(B::add_linear_forward(base, low, b), grad);
    (grad.clone(), amax.then(|| B::fp8_amax(grad)))
}

operation! {
    LowRankSwiGlu { neighbours: SwiGluNeighbours }, 3, ([FloatTensor<B>; 3], SwiGluNeighbours),
    |[base, low, b], _, tracked| {
        let saved = tracked.then(|| ([base.clone(), low.clone(), b.clone()], neighbours.clone()));
        let (out, found) = B::low_rank_swiglu(base, low, b, neighbours.output_amax.is_some());
        KnownAmax::note::<B>(&neighbours.output_amax, found);
        (out, saved)
    },
    |([base, low, b], neighbours), grad, parents| {
        let Parents { ops: Ops { parents: [base_node, low_node, b_node], .. }, grads } = parents;
        let SwiGluNeighbours { gradient_amax, readers, .. } = neighbours;
        let amax = gradient_amax.filter(|_| base_node.is_some());
        let left = readers.and_then(|readers| readers.left_to_writer::<B>());
        let operands = [base, low.clone(), b.clone()];
        let (grad, found) = B::low_rank_swiglu_grad(operands, grad, left, amax.is_some());
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
