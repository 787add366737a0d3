//! The autograd node.

use burn::backend::{
    Autodiff, Backend, Flex, TensorMetadata,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients as Delivered,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::FloatTensor,
};

use super::algorithm::{Answers, backward, forward};
use super::stages::Inputs;
use super::{GatedDeltaCall, GatedDeltaHeads};
use crate::extension::on_backends;
use crate::ssd::node::PLAIN_CHUNK;
use crate::ssd::stages::{SsdShape, StepInputs};
use crate::{extras::Extras, kernels::LocalKernels, main_grads::deliver, plain::ssd::Formulas};

/// The kernels of `gated_delta`; the default bodies are the formulas.
pub trait GatedDeltaKernels: LocalKernels {
    /// Output, and the last states if asked for.
    fn gated_delta(tensors: &Tensors<Self>, with_last: bool) -> Answers<Self> {
        forward::<Self, Formulas>(&tensors.inputs, with_last, tensors.shape(PLAIN_CHUNK))
    }

    /// The gradients of x, β, the steps, their biases, and `a_log`, given that of the output.
    fn gated_delta_grads(tensors: &Tensors<Self>, grad: FloatTensor<Self>) -> [FloatTensor<Self>; 5] {
        backward::<Self, Formulas>(&tensors.inputs, grad, tensors.shape(PLAIN_CHUNK))
    }
}

impl GatedDeltaKernels for Flex {}

/// The tensors of a call.
#[derive(Clone, Debug)]
pub struct Tensors<B: Backend> {
    pub inputs: Inputs<B>,
    pub heads: GatedDeltaHeads,
}

impl<B: Backend> Tensors<B> {
    fn new(
        [x, beta, raw, bias, a_log]: [FloatTensor<B>; 5],
        extras: Vec<FloatTensor<B>>,
        call: &GatedDeltaCall,
    ) -> Self {
        let mut extras = extras.into_iter();
        let ages = if call.divided { extras.next() } else { None };
        let steps = StepInputs { raw, bias, a_log, ages, limits: call.heads.ssd().step_limit };
        Self { inputs: Inputs { x, beta, steps, first: extras.next() }, heads: call.heads }
    }

    /// In chunks of at most so many positions.
    pub fn shape(&self, chunk: usize) -> SsdShape {
        let x = self.inputs.x.shape();
        SsdShape::new([x[0], x[1]], self.heads.ssd(), chunk)
    }
}

#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Autodiff)]
pub(super) trait GatedDeltaOps: Backend {
    /// `extras` are the ages and the first states.
    fn op_gated_delta(
        x: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        dt: FloatTensor<Self>,
        dt_bias: FloatTensor<Self>,
        a_log: FloatTensor<Self>,
        #[extension_type] extras: Extras<Self>,
        config: GatedDeltaCall,
    ) -> FloatTensor<Self>;
}

fn run<B: GatedDeltaKernels>(tensors: &Tensors<B>, call: &GatedDeltaCall) -> FloatTensor<B> {
    let Answers { y, last } = B::gated_delta(tensors, call.last.is_some());
    if let (Some(slot), Some(last)) = (&call.last, last) {
        slot.put::<B>([last]);
    }
    y
}

on_backends! {
    impl GatedDeltaOps {
        fn op_gated_delta(
            x: FloatTensor<Self>,
            beta: FloatTensor<Self>,
            dt: FloatTensor<Self>,
            dt_bias: FloatTensor<Self>,
            a_log: FloatTensor<Self>,
            extras: Extras<Self>,
            config: GatedDeltaCall,
        ) -> FloatTensor<Self> {
            run::<Self>(&Tensors::new([x, beta, dt, dt_bias, a_log], extras.into(), &config), &config)
        }
    }
}

/// Parents: x, β, step sizes, their biases, and `a_log`.
#[derive(Debug)]
struct GatedDelta;

impl<B: GatedDeltaKernels> Backward<B, 5> for GatedDelta {
    type State = Tensors<B>;

    fn backward(self, ops: Ops<Self::State, 5>, grads: &mut Delivered, _: &mut Checkpointer) {
        let gradients = B::gated_delta_grads(&ops.state, grads.consume::<B>(&ops.node));
        for (node, grad) in ops.parents.into_iter().zip(gradients) {
            if let Some(node) = node {
                deliver::<B>(grads, node.id, grad);
            }
        }
    }
}

impl<B: GatedDeltaKernels, C: CheckpointStrategy> GatedDeltaOps for Autodiff<B, C> {
    fn op_gated_delta(
        x: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        dt: FloatTensor<Self>,
        dt_bias: FloatTensor<Self>,
        a_log: FloatTensor<Self>,
        extras: Extras<Self>,
        config: GatedDeltaCall,
    ) -> FloatTensor<Self> {
        let extras = Vec::from(extras).into_iter().map(|x: FloatTensor<Self>| x.into_primitive()).collect();
        let ((x, x_node), (beta, beta_node), (dt, dt_node)) = (x.into_parts(), beta.into_parts(), dt.into_parts());
        let ((dt_bias, bias_node), (a_log, a_node)) = (dt_bias.into_parts(), a_log.into_parts());
        let nodes = [x_node, beta_node, dt_node, bias_node, a_node];
        let tensors = Tensors::<B>::new([x, beta, dt, dt_bias, a_log], extras, &config);
        let y = run::<B>(&tensors, &config);
        match GatedDelta.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(tensors, y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}
