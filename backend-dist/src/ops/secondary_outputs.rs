//! Operations with several outputs. A node of Burn's graph has one output, so the others are secondary nodes: they take
//! their values from a shared slot and store their gradients in it. Nodes run from the last to the first, so the
//! primary node finds all gradients there.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::{
    Autodiff, Backend, Dispatch, Flex,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::FloatTensor,
};
use burn::tensor::Tensor;

/// A tensor whose backend is known to both the writer and the reader.
type Slot = Option<Box<dyn Any + Send>>;

/// The secondary outputs of an operation: forward their values, backward their gradients. Clones share them.
#[derive(Clone, Default)]
pub(super) struct SecondaryOutputs(Arc<Mutex<Vec<Slot>>>);

impl SecondaryOutputs {
    /// Stores the values.
    pub fn put<B: Backend>(&self, values: impl IntoIterator<Item = FloatTensor<B>>) {
        let boxed = |value| -> Slot { Some(Box::new(value)) };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = values.into_iter().map(boxed).collect();
    }

    /// Takes the gradients.
    ///
    /// # Panics
    ///
    /// If an output has no gradient.
    pub fn gradients<B: Backend>(&self) -> Vec<FloatTensor<B>> {
        let count = self.0.lock().unwrap_or_else(PoisonError::into_inner).len();
        (0..count).map(|index| self.take::<B>(index)).collect()
    }

    fn take<B: Backend>(&self, index: usize) -> FloatTensor<B> {
        let found = self.0.lock().unwrap_or_else(PoisonError::into_inner)[index].take();
        let found = found.and_then(|found| found.downcast().ok());
        *found.unwrap_or_else(|| panic!("output {} of an operation has no value, or no gradient", index + 1))
    }

    fn put_gradient<B: Backend>(&self, index: usize, gradient: FloatTensor<B>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)[index] = Some(Box::new(gradient));
    }
}

impl fmt::Debug for SecondaryOutputs {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("SecondaryOutputs")
    }
}

/// Secondary output `index` of the operation whose primary output is `first`. Each must be taken once, and used.
pub(super) fn secondary_output<const D: usize, const E: usize>(
    first: &Tensor<D>,
    secondary: &SecondaryOutputs,
    index: usize,
) -> Tensor<E> {
    let first = first.clone().into_dispatch();
    Tensor::from_dispatch(<Dispatch as OutputOps>::op_secondary(first, secondary.clone(), index))
}

#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Autodiff)]
trait OutputOps: Backend {
    /// `first` only selects the backend and the node.
    fn op_secondary(first: FloatTensor<Self>, secondary: SecondaryOutputs, index: usize) -> FloatTensor<Self>;
}

macro_rules! output_ops {
    ($backend:ty) => {
        impl OutputOps for $backend {
            fn op_secondary(_first: FloatTensor<Self>, secondary: SecondaryOutputs, index: usize) -> FloatTensor<Self> {
                secondary.take::<Self>(index)
            }
        }
    };
}

output_ops!(Flex);
#[cfg(feature = "cuda")]
output_ops!(burn::backend::Cube);

/// Parent: the primary output, to which no gradient flows from here.
#[derive(Debug)]
struct SecondaryNode;

impl<B: Backend> Backward<B, 1> for SecondaryNode {
    type State = (SecondaryOutputs, usize);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (grad, (secondary, index)) = (grads.consume::<B>(&ops.node), ops.state);
        secondary.put_gradient::<B>(index, grad);
    }
}

impl<B: Backend, C: CheckpointStrategy> OutputOps for Autodiff<B, C> {
    fn op_secondary(first: FloatTensor<Self>, secondary: SecondaryOutputs, index: usize) -> FloatTensor<Self> {
        let ((_, node), value) = (first.into_parts(), secondary.take::<B>(index));
        match SecondaryNode.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((secondary, index), value),
            OpsKind::UnTracked(prep) => prep.finish(value),
        }
    }
}
