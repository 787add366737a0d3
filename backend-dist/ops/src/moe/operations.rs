//! The operations: what each saves for backward, and its backward pass.

use crate::Kernels;
use std::sync::Arc;

use burn::backend::{
    FloatDType, Scalar, Shape, TensorMetadata,
    autodiff::{NodeId, grads::Gradients, ops::Ops},
    tensor::{FloatTensor, IntTensor},
};

use super::activation::ExpertActivation;
use super::kernels::{MoeKernels, TokenGroups};
use crate::blockwise::{Kept, QuantizedWeight};
use crate::dtype::cast;
use crate::main_grads::main_grad;
use crate::operation::{Parents, Tensors, operation};
use crate::weight_grads::Deferral;

/// Tokens of each group.
pub type Counts = Arc<[usize]>;

operation! {
    /// The constants are the tables of the map and of the map back.
    pub GatherRows {}, 1, IntTensor<B>,
    |[x], Tensors { ints, .. }, _| {
        let [to, back]: [IntTensor<B>; 2] = ints.try_into().expect("two tables");
        (B::sum_rows(x, to), Some(back))
    },
    |back, grad, parents| parents.register::<B>([B::sum_rows(grad, back)]),
}

operation! {
    pub RouterLogits {}, 2, [FloatTensor<B>; 2],
    |[x, w], _, tracked| {
        let saved = tracked.then(|| [x.clone(), w.clone()]);
        (B::router_logits(x, w), saved)
    },
    |[x, w], grad, parents| {
        let (needed, dtype) = (parents.needed(), w.dtype());
        let Parents { ops: Ops { parents: [x_node, w_node], .. }, grads } = parents;
        let [dx, dw] = B::router_logits_grads(x, w, grad, needed);
        if let Some((node, value)) = w_node.zip(dw) {
            match main_grad::<B>(node.id) {
                Some((sum, add)) => B::accumulate(value, &sum, add),
                None => grads.register::<B>(node.id, cast::<B>(value, dtype)),
            }
        }
        if let Some((node, value)) = x_node.zip(dx) {
            grads.register::<B>(node.id, value);
        }
    },
}

/// Delivers the weight's gradient, now or deferred.
pub fn weight_grad<B: MoeKernels>(
    (id, deferral): (NodeId, Deferral),
    grad: FloatTensor<B>,
    x: FloatTensor<B>,
    counts: Counts,
    grads: &mut Gradients,
) {
    deferral.run(grads, move |grads| match main_grad::<B>(id) {
        Some((sum, add)) => B::grouped_accumulate_weight_grad(grad, x, TokenGroups::alone(&counts), &sum, add),
        None => grads.register::<B>(id, B::grouped_weight_grad(grad, x, TokenGroups::alone(&counts))),
    });
}

operation! {
    /// Saves the input if the weight needs a gradient, the weight if the input does.
    pub GroupedLinear { stored: Option<QuantizedWeight>, counts: Counts, deferral: Deferral }, 2,
    (Option<FloatTensor<B>>, Option<Kept<B>>, Counts, Deferral),
    |[x, w], _, tracked| {
        let kept = tracked.0[0].then(|| Kept::of(&w, stored));
        let saved = (tracked.0[1].then(|| x.clone()), kept, counts.clone(), deferral);
        (B::grouped_forward(x, w, TokenGroups::alone(&counts)), Some(saved))
    },
    |(x, w, counts, deferral), grad, parents| {
        let Parents { ops: Ops { parents: [x_node, w_node], .. }, grads } = parents;
        if let (Some(node), Some(x)) = (w_node, x) {
            weight_grad::<B>((node.id, deferral.of(node.order)), grad.clone(), x, counts.clone(), grads);
        }
        if let (Some(node), Some(w)) = (x_node, w) {
            grads.register::<B>(node.id, B::grouped_input_grad(grad, w.value(), TokenGroups::alone(&counts)));
        }
    },
}

/// Saved by a grouped layer after an activation.
#[derive(Clone, Debug)]
pub struct SavedActivated<B: Kernels> {
    x: FloatTensor<B>,
    p: FloatTensor<B>,
    /// The GEMM's input if the weight needs a gradient; `None` also if it is recomputed.
    input: Option<FloatTensor<B>>,
    w: Kept<B>,
    act: ExpertActivation,
    counts: Counts,
    deferral: Deferral,
}

operation! {
    pub GroupedActivatedLinear {
        stored: Option<QuantizedWeight>, act: ExpertActivation, counts: Counts, recompute: bool, deferral: Deferral,
    }, 3, SavedActivated<B>,
    |[x, p, w], _, tracked| {
        if !tracked.any() {
            return (B::grouped_forward(act.weighted::<B>(x, p), w, TokenGroups::alone(&counts)), None);
        }
        let input = act.weighted::<B>(x.clone(), p.clone());
        let kept = (tracked.0[2] && !recompute).then(|| input.clone());
        let saved = SavedActivated { x, p, input: kept, w: Kept::of(&w, stored), act, counts: counts.clone(), deferral };
        (B::grouped_forward(input, w, TokenGroups::alone(&counts)), Some(saved))
    },
    |SavedActivated { x, p, input, w, act, counts, deferral }, grad, parents| {
        let Parents { ops: Ops { parents: [x_node, p_node, w_node], .. }, grads } = parents;
        if let Some(node) = w_node {
            let input = input.unwrap_or_else(|| act.weighted::<B>(x.clone(), p.clone()));
            weight_grad::<B>((node.id, deferral.of(node.order)), grad.clone(), input, counts.clone(), grads);
        }
        if x_node.is_none() && p_node.is_none() {
            return;
        }
        let [x_grad, p_grad] = act.weighted_grads::<B>(x, p, B::grouped_input_grad(grad, w.value(), TokenGroups::alone(&counts)));
        for (node, value) in [(x_node, x_grad), (p_node, p_grad)] {
            if let Some(node) = node {
                grads.register::<B>(node.id, value);
            }
        }
    },
}

operation! {
    /// Saves the gradient of the loss, and the loss for its device and type.
    pub Inject { scale: f64 }, 2, (f64, FloatTensor<B>),
    |[x, loss], _, _| (x, Some((scale, loss))),
    |(scale, loss), grad, parents| {
        let [_, of_loss] = parents.needed();
        let of_loss = of_loss.then(|| {
            let dtype = FloatDType::from(loss.dtype());
            B::float_full(Shape::from([1]), Scalar::Float(scale), &loss.device(), dtype)
        });
        parents.register::<B>([Some(grad), of_loss]);
    },
}
