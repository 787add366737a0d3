//! The operations on the residual stream.

use burn::backend::{autodiff::ops::Ops, tensor::FloatTensor};

use super::joint::{Joint, ResidualAdd};
use super::kernels::reduced;
use crate::operation::{Parents, Tensors, operation};
use crate::{kernels::LocalKernels, prologue::step_grads, saved_attention::CoreAttention, step::Step};

operation! {
    /// The stream, as an inner node of the graph.
    pub Enter {}, 1, (),
    |[x], _, _| (x, Some(())),
    |(), grad, parents| parents.register::<B>([grad]),
}

operation! {
    /// The stream plus a summand, or the ranks' partial sums of it, before a norm whose parameters are the constants; behind
    /// them may be what is read next. The gradient of a partial sum is that of the sum. Saves the stream's joint.
    pub Plus { add: ResidualAdd }, 2, Joint,
    |[x, other], Tensors { floats: constants, .. }, _| {
        let total = if add.step.is_norm() {
            let (params, next) = constants.split_at(add.step.norm_params());
            let [total, normed] = match &add.group {
                Some(group) => B::norm_of_reduced(x, other, add.step, params, next.first(), group),
                None => B::norm_of_sum(x, other, add.step, params),
            };
            add.output.put_normed::<B>(normed);
            total
        } else {
            let other = add.group.iter().fold(other, |partial, group| reduced::<B>(partial, group));
            B::float_add(x, other)
        };
        (total, Some(add.input))
    },
    |joint, grad, parents| {
        let Parents { ops: Ops { parents: [x, other], .. }, grads } = parents;
        if let Some(node) = x {
            grads.register::<B>(node.id, grad.clone());
            joint.mark_registered();
        }
        if let Some(node) = other {
            grads.register::<B>(node.id, grad);
        }
    },
}

/// Saved by [`Apply`].
#[derive(Clone, Debug)]
pub struct Saved<B: LocalKernels> {
    x: FloatTensor<B>,
    params: Vec<FloatTensor<B>>,
    step: Step,
    joint: Joint,
}

operation! {
    /// A norm or an activation of the input; further inputs are its parameters. `joint` is that of a norm's input.
    pub Apply { step: Step, joint: Joint } for N, N, Saved<B>,
    |inputs, _, tracked| {
        let mut params = Vec::from(inputs);
        let x = params.remove(0);
        let saved = tracked.then(|| Saved { x: x.clone(), params: params.clone(), step, joint: joint.clone() });
        let normed = joint.take_normed::<B>();
        (normed.unwrap_or_else(|| step.forward::<B>(x, &params, &CoreAttention::Compute).out), saved)
    },
    |Saved { x, params, step, joint }, grad, mut parents| {
        let other = joint.take_gradient::<B, N>(&mut parents);
        let needed = parents.needed();
        parents.deliver::<B>(step_grads::<B, N>(step, x, &params, None, grad, other, needed));
    },
}
