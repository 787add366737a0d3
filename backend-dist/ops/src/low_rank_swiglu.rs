//! SwiGLU of what a frozen layer and its adapters compute, as one autograd node: their sum, which is as wide as gate and
//! up together, is neither written nor read on GPUs that have a kernel for it.

use burn::backend::{autodiff::ops::Ops, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::{
    fp8::{KnownAmax, ToldGradient},
    low_rank::{ForFp8, deliver_grads, tell},
    operation::{Parents, apply, operation},
    shared_input::SharedInput,
};

/// [`swiglu`](super::swiglu) of `base + low · bᵀ` for `base [s, b, 2 f] = [gate | up]`, `low [s, b, r]` and `b [2 f, r]`;
/// output `[s, b, f]`. With `low [s, b, 2 r]` the gate's part of the sum has the first `r` columns, up's the others.
///
/// # Panics
///
/// If the sizes do not fit.
pub fn low_rank_swiglu(base: Tensor<3>, low: Tensor<3>, b: Tensor<2>, neighbours: SwiGluNeighbours) -> Tensor<3> {
    let (shape, [positions, samples, inner], of_b) = (base.dims(), low.dims(), b.dims());
    let of_low = [of_b[1], 2 * of_b[1]].contains(&inner);
    let fits = shape == [positions, samples, of_b[0]] && of_low && of_b[0].is_multiple_of(2);
    assert!(fits, "low_rank_swiglu: {shape:?} + {:?} · {of_b:?}ᵀ", low.dims());
    apply(LowRankSwiGlu { neighbours }, [base.into_dispatch(), low.into_dispatch(), b.into_dispatch()])
}

/// What [`low_rank_swiglu`] and the layers before and behind it tell each other.
#[derive(Clone, Debug, Default)]
pub struct SwiGluNeighbours {
    /// The layer behind is in FP8 and is told the amax of the output.
    pub output_amax: Option<KnownAmax>,
    /// The layer before is in FP8 and is told the gradient of `base` as it is cast.
    pub gradient: Option<ToldGradient>,
    /// The output's two readers, an adapter and a frozen weight, of which the adapter leaves its GEMM to the gradient
    /// of this operation ([`SharedInput::added_by_writer`]).
    pub readers: Option<SharedInput>,
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
        let SwiGluNeighbours { gradient, readers, .. } = neighbours;
        let told = gradient.filter(|told| base_node.is_some() && told.is_read());
        let left = readers.and_then(|readers| readers.left_to_writer::<B>());
        let operands = [base, low.clone(), b.clone()];
        let (grad, found) = B::low_rank_swiglu_grad(operands, grad, left, told.is_some());
        let for_fp8 = match (&told, found) {
            (Some(told), Some(amax)) => {
                let (scales, number) = told.scales::<B>(grad.clone(), amax);
                ForFp8::Cast(scales, number)
            }
            _ => ForFp8::Nothing,
        };
        let [low_node, b_node] = [low_node, b_node].map(|node| node.map(|node| node.id));
        let made = deliver_grads::<B>(grads, grad.clone(), (low, low_node), (b, b_node), for_fp8);
        tell::<B>(told, made);
        if let Some(node) = base_node {
            grads.register::<B>(node.id, grad);
        }
    },
}
