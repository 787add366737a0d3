//! FP8 GEMMs of an MoE layer's experts: the public functions, and the operations.

use crate::Kernels;
use std::sync::Arc;

use burn::backend::{autodiff::ops::Ops, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::experts::{self, Fp8Experts, Weight};
use super::linear_gemms::Purpose;
use crate::dtype::wide;
use crate::moe::ExpertActivation;
use crate::operation::{Parents, apply, operation};

/// [`moe::grouped_linear`](crate::moe::grouped_linear) in FP8, with several groups of tokens for each of the
/// experts of `layer`: `counts` has the groups of the first expert, then as many of the next. Each group has its own
/// scale.
///
/// # Panics
/// If the shapes do not fit, or a group's tokens, the inputs or the outputs are no multiples of [`Fp8Experts::multiple`].
pub fn grouped_linear(x: Tensor<2>, w: Tensor<2>, counts: &Arc<[usize]>, layer: &Fp8Experts) -> Tensor<2> {
    check(x.dims(), w.dims(), counts, layer);
    apply(GroupedLinear { counts: counts.clone(), layer: layer.clone() }, [x, w].map(Tensor::into_dispatch))
}

/// [`moe::grouped_activated_linear`](crate::moe::grouped_activated_linear) in FP8, with groups as [`grouped_linear`].
///
/// # Panics
/// As [`grouped_linear`], or if the types do not fit.
pub fn grouped_activated_linear(
    x: Tensor<2>,
    p: Tensor<1>,
    w: Tensor<2>,
    act: ExpertActivation,
    counts: &Arc<[usize]>,
    recompute: bool,
    layer: &Fp8Experts,
) -> Tensor<2> {
    let ([rows, features], inputs) = (x.dims(), act.inputs());
    assert!(features.is_multiple_of(inputs), "grouped_activated_linear: {features} features are not [gate | up]");
    assert_eq!(p.dims(), [rows], "grouped_activated_linear: a probability for each of {rows} rows");
    let wide = wide(x.dtype());
    assert_eq!(p.dtype(), wide, "grouped_activated_linear: the type of the probabilities of {:?}", x.dtype());
    check([rows, features / inputs], w.dims(), counts, layer);
    let operation = GroupedActivatedLinear { act, counts: counts.clone(), recompute, layer: layer.clone() };
    apply(operation, [x.into_dispatch(), p.into_dispatch(), w.into_dispatch()])
}

fn check([rows, inner]: [usize; 2], w: [usize; 2], counts: &[usize], layer: &Fp8Experts) {
    let (experts, multiple) = (layer.count(), layer.multiple());
    assert!(
        !counts.is_empty()
            && counts.len().is_multiple_of(experts)
            && w[0].is_multiple_of(multiple * experts)
            && w[1] == inner
            && inner.is_multiple_of(multiple),
        "FP8 experts: weight {w:?} of {experts} experts for {} groups of tokens of {inner} features; outputs and inputs must \
         be multiples of {multiple}",
        counts.len()
    );
    assert!(
        rows > 0 && counts.iter().sum::<usize>() == rows && counts.iter().all(|count| count.is_multiple_of(multiple)),
        "FP8 experts: groups {counts:?} of {rows} tokens must add up to them in multiples of {multiple}; pad with zeros"
    );
}

/// Tokens of each group.
type Counts = Arc<[usize]>;

/// Saved for backward; `activation` are the operands of the one before the GEMM.
#[derive(Clone, Debug)]
struct State<B: Kernels, S> {
    layer: Fp8Experts,
    counts: Counts,
    saved: experts::SavedExperts<B>,
    w: FloatTensor<B>,
    activation: S,
}

operation! {
    GroupedLinear { counts: Counts, layer: Fp8Experts }, 2, State<B, ()>,
    |[x, w], _, tracked| {
        if !tracked.any() {
            return (experts::forward::<B>(&layer, x, w, &counts, Purpose::Evaluate).0, None);
        }
        let purpose = Purpose::Train { keep: tracked.0[1] };
        let (y, saved) = experts::forward::<B>(&layer, x, w.clone(), &counts, purpose);
        (y, Some(State { layer, counts, saved, w, activation: () }))
    },
    |State { layer, counts, saved, w, .. }, grad, parents| {
        let Parents { ops: Ops { parents: [x_node, w_node], .. }, grads } = parents;
        let weight =
            w_node.map(|node| Weight { id: node.id, deferral: layer.pass.weight_grads.of(node.order), input: None });
        let w = x_node.is_some().then_some(w);
        let x_grad = experts::backward::<B>(&layer, saved, grad, w, weight, &counts, grads);
        if let (Some(node), Some(value)) = (x_node, x_grad) {
            grads.register::<B>(node.id, value);
        }
    },
}

operation! {
    GroupedActivatedLinear { act: ExpertActivation, counts: Counts, recompute: bool, layer: Fp8Experts }, 3,
    State<B, Activation<B>>,
    |[x, p, w], _, tracked| {
        if !tracked.any() {
            let input = act.weighted::<B>(x, p);
            return (experts::forward::<B>(&layer, input, w, &counts, Purpose::Evaluate).0, None);
        }
        let purpose = Purpose::Train { keep: tracked.0[2] && !recompute };
        let input = act.weighted::<B>(x.clone(), p.clone());
        let (y, saved) = experts::forward::<B>(&layer, input, w.clone(), &counts, purpose);
        (y, Some(State { layer, counts, saved, w, activation: Activation { act, x, p, recompute } }))
    },
    |State { layer, counts, saved, w, activation: Activation { act, x, p, recompute } }, grad, parents| {
        let Parents { ops: Ops { parents: [x_node, p_node, w_node], .. }, grads } = parents;
        let weight = w_node.map(|node| {
            let input = recompute.then(|| act.weighted::<B>(x.clone(), p.clone()));
            Weight { id: node.id, deferral: layer.pass.weight_grads.of(node.order), input }
        });
        let w = (x_node.is_some() || p_node.is_some()).then_some(w);
        let Some(grad) = experts::backward::<B>(&layer, saved, grad, w, weight, &counts, grads) else { return };
        let [x_grad, p_grad] = act.weighted_grads::<B>(x, p, grad);
        for (node, value) in [(x_node, x_grad), (p_node, p_grad)] {
            if let Some(node) = node {
                grads.register::<B>(node.id, value);
            }
        }
    },
}

/// The operands of an activation, and whether it is recomputed.
#[derive(Clone, Debug)]
struct Activation<B: Kernels> {
    act: ExpertActivation,
    x: FloatTensor<B>,
    p: FloatTensor<B>,
    recompute: bool,
}
