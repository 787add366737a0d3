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

use super::algorithm::{Answers, Gradients, backward, forward};
use super::stages::{Combined, SsdShape, StepInputs};
use super::{SsdConfig, SsdHeads};
use crate::extension::on_backends;
use crate::{extras::Extras, kernels::LocalKernels, main_grads::deliver, plain::ssd::Formulas};

/// Positions of a chunk of the formulas.
pub const PLAIN_CHUNK: usize = 64;

/// The kernels of `ssd`; the default bodies are the formulas.
pub trait SsdKernels: LocalKernels {
    /// Output and states.
    fn ssd(tensors: &Tensors<Self>, first: Option<FloatTensor<Self>>) -> Answers<Self> {
        forward::<Self, Formulas>(&tensors.steps, &tensors.inputs, first, tensors.shape(PLAIN_CHUNK))
    }

    /// The gradients, given that of the output and the states in front of chunks.
    fn ssd_grads(tensors: &Tensors<Self>, in_front: &FloatTensor<Self>, grad: FloatTensor<Self>) -> Gradients<Self> {
        backward::<Self, Formulas>(&tensors.steps, &tensors.inputs, in_front, grad, tensors.shape(PLAIN_CHUNK))
    }
}

impl SsdKernels for Flex {}

/// The tensors of a call.
#[derive(Clone, Debug)]
pub struct Tensors<B: Backend> {
    pub steps: StepInputs<B>,
    pub inputs: Combined<B>,
    pub heads: SsdHeads,
}

impl<B: Backend> Tensors<B> {
    /// In chunks of at most so many positions.
    pub fn shape(&self, chunk: usize) -> SsdShape {
        let x = self.inputs.x.shape();
        SsdShape::new([x[0], x[1]], self.heads, chunk)
    }
}

/// The ages and the first states.
fn further<T>(extras: Vec<T>, config: &SsdConfig) -> [Option<T>; 2] {
    let mut extras = extras.into_iter();
    let ages = if config.divided { extras.next() } else { None };
    [ages, extras.next()]
}

#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Autodiff)]
pub(super) trait SsdOps: Backend {
    /// `extras` are the ages and the first states.
    fn op_ssd(
        x: FloatTensor<Self>,
        dt: FloatTensor<Self>,
        dt_bias: FloatTensor<Self>,
        a_log: FloatTensor<Self>,
        skip: FloatTensor<Self>,
        #[extension_type] extras: Extras<Self>,
        config: SsdConfig,
    ) -> FloatTensor<Self>;
}

fn run<B: SsdKernels>(tensors: &Tensors<B>, first: Option<FloatTensor<B>>, config: &SsdConfig) -> [FloatTensor<B>; 2] {
    let Answers { y, in_front, last } = B::ssd(tensors, first);
    if let Some(slot) = &config.last {
        slot.put::<B>([last]);
    }
    [y, in_front]
}

fn tensors<B: Backend>(
    [x, raw, bias, a_log, skip]: [FloatTensor<B>; 5],
    ages: Option<FloatTensor<B>>,
    heads: SsdHeads,
) -> Tensors<B> {
    let steps = StepInputs { raw, bias, a_log, ages, limits: heads.step_limit };
    Tensors { steps, inputs: Combined { x, skip }, heads }
}

on_backends! {
    impl SsdOps {
        fn op_ssd(
            x: FloatTensor<Self>,
            dt: FloatTensor<Self>,
            dt_bias: FloatTensor<Self>,
            a_log: FloatTensor<Self>,
            skip: FloatTensor<Self>,
            extras: Extras<Self>,
            config: SsdConfig,
        ) -> FloatTensor<Self> {
            let [ages, first] = further(extras.into(), &config);
            let tensors = tensors::<Self>([x, dt, dt_bias, a_log, skip], ages, config.heads);
            let [y, _] = run::<Self>(&tensors, first, &config);
            y
        }
    }
}

/// Parents: x with B and C, step sizes, their biases, `a_log`, and D.
#[derive(Debug)]
struct Ssd;

impl<B: SsdKernels> Backward<B, 5> for Ssd {
    /// The inputs, and the states in front of chunks.
    type State = (Tensors<B>, FloatTensor<B>);

    fn backward(self, ops: Ops<Self::State, 5>, grads: &mut Delivered, _: &mut Checkpointer) {
        let (grad, (tensors, in_front)) = (grads.consume::<B>(&ops.node), ops.state);
        let Gradients { x, of_heads: [dt, dt_bias, a_log, skip] } = B::ssd_grads(&tensors, &in_front, grad);
        for (node, grad) in ops.parents.into_iter().zip([x, dt, dt_bias, a_log, skip]) {
            if let Some(node) = node {
                deliver::<B>(grads, node.id, grad);
            }
        }
    }
}

impl<B: SsdKernels, C: CheckpointStrategy> SsdOps for Autodiff<B, C> {
    fn op_ssd(
        x: FloatTensor<Self>,
        dt: FloatTensor<Self>,
        dt_bias: FloatTensor<Self>,
        a_log: FloatTensor<Self>,
        skip: FloatTensor<Self>,
        extras: Extras<Self>,
        config: SsdConfig,
    ) -> FloatTensor<Self> {
        let [ages, first] = further(Vec::from(extras), &config).map(|x| x.map(|x| x.into_primitive()));
        let ((x, x_node), (dt, dt_node)) = (x.into_parts(), dt.into_parts());
        let (dt_bias, bias_node) = dt_bias.into_parts();
        let ((a_log, a_node), (skip, skip_node)) = (a_log.into_parts(), skip.into_parts());
        let nodes = [x_node, dt_node, bias_node, a_node, skip_node];
        let tensors = tensors::<B>([x, dt, dt_bias, a_log, skip], ages, config.heads);
        let [y, in_front] = run::<B>(&tensors, first, &config);
        match Ssd.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((tensors, in_front), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}
