//! The linear layer as a node of the graph: what it keeps and which gradients it computes.

use burn::backend::{
    Autodiff,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    tensor::FloatTensor,
};

use super::{FusedOps, How, Output, forward};
use crate::ops::{
    context::attend,
    extras::Extras,
    fp8::{self, Fp8Kept, Fp8Weight, Purpose},
    kernels::LocalKernels,
    main_grads::deliver,
    product::{Products, Weight},
    prologue::{Step, side_by_side},
};

/// What a linear layer keeps for its backward pass.
#[derive(Clone, Debug)]
struct Kept<B: LocalKernels> {
    how: How,
    /// The prologue's input, unless nothing in front of the product needs it.
    x: Option<FloatTensor<B>>,
    params: Vec<FloatTensor<B>>,
    /// The product's input if the weight wants a gradient; `None` also if it is made again from `x`.
    out: Option<FloatTensor<B>>,
    /// Of attention, unless made again.
    statistics: Option<[FloatTensor<B>; 2]>,
    /// If something in front of the product wants a gradient.
    w: Option<FloatTensor<B>>,
    /// Of a product in FP8, which keeps its own form of `out`.
    fp8: Option<Fp8Kept<B>>,
}

/// Parents: the input, the prologue's parameters, the bias if there is one, the weight.
#[derive(Debug)]
struct Linear;

impl<B: Products, const N: usize> Backward<B, N> for Linear {
    type State = Kept<B>;

    fn backward(self, ops: Ops<Kept<B>, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let other = ops.state.how.joint.as_ref().and_then(|joint| joint.take_gradient::<B, _, N>(&ops, grads));
        let Kept { how, x, params, out, mut statistics, w, fp8 } = ops.state;
        let How { step, context, ends, fp8: layer, recompute, bias, joint: _ } = how;
        let (weight, others) = (&ops.parents[N - 1], &ops.parents[..N - 1]);
        let (inputs, biases) = others.split_at(others.len() - usize::from(bias));
        if let [Some(node)] = biases {
            deliver::<B>(grads, node.id, B::bias_grad(grad.clone()));
        }
        let mut out = out.or_else(|| statistics.as_ref().map(|[out, _]| side_by_side::<B>(out.clone())));
        let used = weight.is_some() || matches!(step, Step::Attention(..));
        let mut again = None;
        if let (true, Some(x)) = (recompute && used, &x) {
            if let (Step::Attention(heads, _), Some(how)) = (step, &context) {
                let (attended, kept) = attend::<B>(x.clone(), heads, how);
                (out, again) = (Some(attended), Some((kept, how)));
            } else {
                let made = step.forward::<B>(x.clone(), &params);
                (out, statistics) = (Some(made.out), made.statistics);
            }
        }
        let weight = weight.as_ref().map(|node| (node.id, node.order == 0));
        let grad = match layer.zip(fp8) {
            Some((layer, kept)) => {
                let weight = weight.map(|(id, is_leaf)| Fp8Weight { id, is_leaf, input: out });
                fp8::backward::<B>(&layer, kept, grad, w, weight, &ends, grads)
            }
            None => {
                let weight = weight.zip(out).map(|((id, is_leaf), input)| Weight { id, is_leaf, input });
                B::product_grads(grad, w, weight, &ends, grads)
            }
        };
        match (grad, again) {
            (Some(grad), Some((kept, how))) => {
                let grad = kept.grad(grad, how);
                if let [Some(node)] = inputs {
                    deliver::<B>(grads, node.id, grad);
                }
            }
            (Some(grad), None) => {
                let needed: [bool; N] = std::array::from_fn(|i| inputs.get(i).is_some_and(Option::is_some));
                let x = x.unwrap_or_else(|| grad.clone());
                for (node, grad) in inputs.iter().zip(step.grads::<B, N>(x, &params, statistics, grad, other, needed)) {
                    if let (Some(node), Some(grad)) = (node, grad) {
                        deliver::<B>(grads, node.id, grad);
                    }
                }
            }
            (None, _) => {}
        }
    }
}

/// `inputs` are those of [`Linear`].
fn record<B: Products, C: CheckpointStrategy, const N: usize>(
    inputs: [FloatTensor<Autodiff<B, C>>; N],
    how: How,
) -> FloatTensor<Autodiff<B, C>> {
    let tracked = inputs.each_ref().map(|input| input.is_tracked());
    let inputs_end = N - 1 - usize::from(how.bias);
    let (weight, others) = (tracked[N - 1], tracked[..inputs_end].contains(&true));
    let mut tensors = Vec::with_capacity(N);
    let nodes = inputs.map(|input| {
        let (tensor, node) = input.into_parts();
        tensors.push(tensor);
        node
    });
    let w = tensors.pop().expect("a linear layer has a weight");
    let x = tensors.remove(0);
    // Compute-bound: a checkpointing strategy must never repeat an exchange.
    match Linear.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let (plain, again) = (matches!(how.step, Step::None), how.recompute);
            let attention = matches!(how.step, Step::Attention(..));
            let keep = weight && !attention && (plain || !again);
            let Output { y, made, fp8 } = forward::<B>(x.clone(), &tensors, w.clone(), &how, Purpose::Train { keep });
            // The bias is not needed again.
            tensors.truncate(inputs_end - 1);
            let kept = Kept {
                x: (!plain && (others || again)).then_some(x),
                params: tensors,
                out: (keep && fp8.is_none()).then_some(made.out),
                statistics: made.statistics.filter(|_| !again),
                w: others.then_some(w),
                fp8,
                how: How { recompute: again && !plain, ..how },
            };
            prep.finish(kept, y)
        }
        OpsKind::UnTracked(prep) => prep.finish(forward::<B>(x, &tensors, w, &how, Purpose::Evaluate).y),
    }
}

impl<B: Products, C: CheckpointStrategy> FusedOps for Autodiff<B, C> {
    fn op_linear(x: FloatTensor<Self>, extras: Extras<Self>, w: FloatTensor<Self>, how: How) -> FloatTensor<Self> {
        match extras {
            Extras::None => record::<B, C, 2>([x, w], how),
            Extras::One(a) => record::<B, C, 3>([x, a, w], how),
            Extras::Two(a, b) => record::<B, C, 4>([x, a, b, w], how),
            Extras::Three(a, b, c) => record::<B, C, 5>([x, a, b, c, w], how),
        }
    }
}
