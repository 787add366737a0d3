//! The kernels, and the operation.

use burn::backend::{Backend, Flex, TensorMetadata, tensor::FloatTensor};

use super::GatedDeltaHeads;
use super::algorithm::{Answers, backward, forward};
use super::stages::Inputs;
use crate::ssd::node::PLAIN_CHUNK;
use crate::ssd::stages::{SsdShape, StepInputs};
use crate::{kernels::LocalKernels, operation::operation, plain::ssd::Formulas, secondary_outputs::SecondaryOutputs};

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
    /// In chunks of at most so many positions.
    pub fn shape(&self, chunk: usize) -> SsdShape {
        let x = self.inputs.x.shape();
        SsdShape::new([x[0], x[1]], self.heads.ssd(), chunk)
    }
}

operation! {
    /// Of x, β, step sizes, their biases, and `a_log`. The constants are the ages, if sequences are divided into documents,
    /// and the first states, if there are some; the last ones go to `last`.
    pub(super) GatedDelta { heads: GatedDeltaHeads, divided: bool, last: Option<SecondaryOutputs> }, 5, Tensors<B>,
    |[x, beta, raw, bias, a_log], constants, tracked| {
        let mut constants = constants.floats.into_iter();
        let ages = if divided { constants.next() } else { None };
        let steps = StepInputs { raw, bias, a_log, ages, limits: heads.ssd().step_limit };
        let tensors = Tensors { inputs: Inputs { x, beta, steps, first: constants.next() }, heads };
        let Answers { y, last: states } = B::gated_delta(&tensors, last.is_some());
        if let (Some(slot), Some(states)) = (last, states) {
            slot.put::<B>([states]);
        }
        (y, tracked.then(|| tensors))
    },
    |tensors, grad, parents| parents.deliver::<B>(B::gated_delta_grads(&tensors, grad)),
}
