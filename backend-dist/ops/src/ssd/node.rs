//! The kernels, and the operation.

use burn::backend::{Backend, Flex, TensorMetadata, tensor::FloatTensor};

use super::SsdHeads;
use super::algorithm::{Answers, Gradients, backward, forward};
use super::stages::{Combined, SsdShape, StepInputs};
use crate::{kernels::LocalKernels, operation::operation, plain::ssd::Formulas, secondary_outputs::SecondaryOutputs};

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

operation! {
    /// Of x with B and C, step sizes, their biases, `a_log`, and D. The constants are the ages, if sequences are divided into
    /// documents, and the first states, if there are some; the last ones go to `last`. Saves the states in front of chunks.
    pub(super) Ssd { heads: SsdHeads, divided: bool, last: Option<SecondaryOutputs> }, 5, (Tensors<B>, FloatTensor<B>),
    |[x, raw, bias, a_log, skip], constants, tracked| {
        let mut constants = constants.floats.into_iter();
        let ages = if divided { constants.next() } else { None };
        let steps = StepInputs { raw, bias, a_log, ages, limits: heads.step_limit };
        let tensors = Tensors { steps, inputs: Combined { x, skip }, heads };
        let Answers { y, in_front, last: states } = B::ssd(&tensors, constants.next());
        if let Some(slot) = last {
            slot.put::<B>([states]);
        }
        (y, tracked.then(|| (tensors, in_front)))
    },
    |(tensors, in_front), grad, parents| {
        let Gradients { x, of_heads: [dt, dt_bias, a_log, skip] } = B::ssd_grads(&tensors, &in_front, grad);
        parents.deliver::<B>([x, dt, dt_bias, a_log, skip]);
    },
}
