//! The operations on the residual stream as Burn backend extensions and autograd nodes.

use burn::backend::{
    Autodiff, Backend,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops},
    },
    backend_extension,
    tensor::FloatTensor,
};

use super::{
    joint::{Joint, ResidualAdd},
    kernels::{ResidualKernels, reduced},
};
use crate::extension::{finish, node, on_backends};
use crate::{extras::Extras, main_grads::deliver, prologue::step_grads, saved_attention::CoreAttention, step::Step};

#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Autodiff)]
pub(super) trait ResidualOps: Backend {
    /// `x`, as an inner node of the graph.
    fn op_enter(x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// `x + other`, before a norm with `params`, to which no gradient flows from here. The gradient of a partial sum is
    /// that of the sum; behind the norm's parameters may be what is read next.
    fn op_sum(
        x: FloatTensor<Self>,
        other: FloatTensor<Self>,
        #[extension_type] params: Extras<Self>,
        sum: ResidualAdd,
    ) -> FloatTensor<Self>;

    /// A norm with one or two parameters.
    fn op_norm(
        x: FloatTensor<Self>,
        #[extension_type] params: Extras<Self>,
        norm: Step,
        joint: Joint,
    ) -> FloatTensor<Self>;
}

fn sum<B: ResidualKernels>(
    x: FloatTensor<B>,
    other: FloatTensor<B>,
    params: &[FloatTensor<B>],
    sum: &ResidualAdd,
) -> FloatTensor<B> {
    if !sum.step.is_norm() {
        let other = sum.group.iter().fold(other, |partial, group| reduced::<B>(partial, group));
        return B::float_add(x, other);
    }
    let (params, next) = params.split_at(sum.step.norm_params());
    let [total, normed] = match &sum.group {
        Some(group) => B::norm_of_reduced(x, other, sum.step, params, next.first(), group),
        None => B::norm_of_sum(x, other, sum.step, params),
    };
    sum.output.put_normed::<B>(normed);
    total
}

fn norm<B: ResidualKernels>(x: FloatTensor<B>, params: &[FloatTensor<B>], norm: Step, joint: &Joint) -> FloatTensor<B> {
    joint.take_normed::<B>().unwrap_or_else(|| norm.forward::<B>(x, params, &CoreAttention::Compute).out)
}

on_backends! {
    impl ResidualOps {
        fn op_enter(x: FloatTensor<Self>) -> FloatTensor<Self> {
            x
        }

        fn op_sum(
            x: FloatTensor<Self>,
            other: FloatTensor<Self>,
            params: Extras<Self>,
            add: ResidualAdd,
        ) -> FloatTensor<Self> {
            sum::<Self>(x, other, &Vec::from(params), &add)
        }

        fn op_norm(x: FloatTensor<Self>, params: Extras<Self>, step: Step, joint: Joint) -> FloatTensor<Self> {
            norm::<Self>(x, &Vec::from(params), step, &joint)
        }
    }
}

node!(Enter: Backend, 1, (), |ops, grad, grads| {
    if let [Some(node)] = ops.parents {
        grads.register::<B>(node.id, grad);
    }
});

// Parents: the stream, the summand. Saves the stream's joint.
node!(Plus: Backend, 2, Joint, |ops, grad, grads| {
    let [x, other] = ops.parents;
    if let Some(node) = x {
        grads.register::<B>(node.id, grad.clone());
        ops.state.mark_registered();
    }
    if let Some(node) = other {
        grads.register::<B>(node.id, grad);
    }
});

/// Parents: the stream, the norm's parameters.
#[derive(Debug)]
struct Norm;

#[derive(Clone, Debug)]
struct Saved<B: Backend> {
    x: FloatTensor<B>,
    params: Vec<FloatTensor<B>>,
    step: Step,
    joint: Joint,
}

impl<B: ResidualKernels, const N: usize> Backward<B, N> for Norm {
    type State = Saved<B>;

    fn backward(self, ops: Ops<Saved<B>, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let other = ops.state.joint.take_gradient::<B, _, N>(&ops, grads);
        let Saved { x, params, step, joint: _ } = ops.state;
        let needed = ops.parents.each_ref().map(Option::is_some);
        for (node, grad) in ops.parents.into_iter().zip(step_grads::<B, N>(step, x, &params, None, grad, other, needed))
        {
            if let (Some(node), Some(grad)) = (node, grad) {
                deliver::<B>(grads, node.id, grad);
            }
        }
    }
}

fn record_sum<B: ResidualKernels, C: CheckpointStrategy>(
    [x, other]: [FloatTensor<Autodiff<B, C>>; 2],
    params: &[FloatTensor<B>],
    add: ResidualAdd,
) -> FloatTensor<Autodiff<B, C>> {
    let ((x, x_node), (other, other_node)) = (x.into_parts(), other.into_parts());
    let total = sum::<B>(x, other, params, &add);
    finish!(Plus, [x_node, other_node], add.input, total)
}

/// `inputs` are those of [`Norm`].
fn record_norm<B: ResidualKernels, C: CheckpointStrategy, const N: usize>(
    inputs: [FloatTensor<Autodiff<B, C>>; N],
    step: Step,
    joint: Joint,
) -> FloatTensor<Autodiff<B, C>> {
    let mut params = Vec::with_capacity(N);
    let nodes = inputs.map(|input| {
        let (tensor, node) = input.into_parts();
        params.push(tensor);
        node
    });
    let x = params.remove(0);
    let y = norm::<B>(x.clone(), &params, step, &joint);
    finish!(Norm, nodes, Saved { x, params, step, joint }, y)
}

impl<B: ResidualKernels, C: CheckpointStrategy> ResidualOps for Autodiff<B, C> {
    fn op_enter(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        finish!(Enter, [node], (), x)
    }

    fn op_sum(
        x: FloatTensor<Self>,
        other: FloatTensor<Self>,
        params: Extras<Self>,
        add: ResidualAdd,
    ) -> FloatTensor<Self> {
        let params: Vec<_> = Vec::from(params).into_iter().map(|param| param.into_primitive()).collect();
        record_sum::<B, C>([x, other], &params, add)
    }

    fn op_norm(x: FloatTensor<Self>, params: Extras<Self>, step: Step, joint: Joint) -> FloatTensor<Self> {
        match params {
            Extras::One(w) => record_norm::<B, C, 2>([x, w], step, joint),
            Extras::Two(w, b) => record_norm::<B, C, 3>([x, w, b], step, joint),
            Extras::None | Extras::Three(..) => unreachable!("{step:?} has one or two parameters"),
        }
    }
}
