//! The second layer of experts with biases behind their clamped SwiGLU (gpt-oss), as one operation.

use crate::Kernels;
use burn::backend::{TensorMetadata, autodiff::ops::Ops, tensor::FloatTensor};

use super::biased::ClampedSwiGlu;
use super::kernels::TokenGroups;
use super::operations::{Counts, weight_grad};
use crate::blockwise::{Kept, QuantizedWeight};
use crate::dtype::cast;
use crate::main_grads::main_grad;
use crate::operation::{Parents, operation};
use crate::weight_grads::Deferral;

#[derive(Clone, Debug)]
pub struct SavedBiased<B: Kernels> {
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

operation! {
    /// Of the first layer's output, the probabilities, the second layer's weight, and both biases.
    pub GroupedClampedLinear {
        stored: Option<QuantizedWeight>, act: ClampedSwiGlu, counts: Counts, recompute: bool, deferral: Deferral,
    }, 5, SavedBiased<B>,
    |[x, p, w, first, second], _, tracked| {
        let input = B::clamped_swiglu(x.clone(), first.clone(), p.clone(), &counts, act);
        let kept = (tracked.0[2] && !recompute).then(|| input.clone());
        let y = B::biased_forward(input, w.clone(), [second.clone(), p.clone()], TokenGroups::alone(&counts));
        let saved = tracked.then(|| {
            let (w, biases) = (Kept::of(&w, stored), [first, second]);
            SavedBiased { x, p, biases, input: kept, w, act, counts, deferral }
        });
        (y, saved)
    },
    |SavedBiased { x, p, biases: [first, second], input, w, act, counts, deferral }, grad, parents| {
        let Parents { ops: Ops { parents: [x_node, p_node, w_node, first_node, second_node], .. }, grads } = parents;
        if let Some(node) = w_node {
            let again = || B::clamped_swiglu(x.clone(), first.clone(), p.clone(), &counts, act);
            let input = input.unwrap_or_else(again);
            weight_grad::<B>((node.id, deferral.of(node.order)), grad.clone(), input, counts.clone(), grads);
        }
        let dtypes = [first.dtype(), second.dtype()];
        let of_input = B::grouped_input_grad(grad.clone(), w.value(), TokenGroups::alone(&counts));
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
    },
}
