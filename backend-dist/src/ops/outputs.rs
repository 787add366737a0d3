//! Operations with several outputs. A node of Burn's graph has one: the others are nodes behind it, which find their
//! values beside it and leave their gradients there. Nodes run from the last to the first, so that the operation's own
//! node finds all of them.

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

/// A tensor of a backend that is known where it is put and where it is taken.
type Slot = Option<Box<dyn Any + Send>>;

/// The outputs of an operation behind its first: forward their values, backward their gradients. Clones are the same.
#[derive(Clone, Default)]
pub(super) struct Others(Arc<Mutex<Vec<Slot>>>);

impl Others {
    /// Leaves the values.
    pub fn put<B: Backend>(&self, values: impl IntoIterator<Item = FloatTensor<B>>) {
        let boxed = |value| -> Slot { Some(Box::new(value)) };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = values.into_iter().map(boxed).collect();
    }

    /// Takes the gradients.
    ///
    /// # Panics
    ///
    /// If an output has got none.
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

impl fmt::Debug for Others {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("Others")
    }
}

/// Output `index` of the others, next to the operation's `first`. Each must be asked for once, and used.
pub(super) fn other<const D: usize, const E: usize>(first: &Tensor<D>, others: &Others, index: usize) -> Tensor<E> {
    let first = first.clone().into_dispatch();
    Tensor::from_dispatch(<Dispatch as OutputOps>::op_other(first, others.clone(), index))
}

#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Autodiff)]
trait OutputOps: Backend {
    /// `first` only tells the backend and the node.
    fn op_other(first: FloatTensor<Self>, others: Others, index: usize) -> FloatTensor<Self>;
}

macro_rules! output_ops {
    ($backend:ty) => {
        impl OutputOps for $backend {
            fn op_other(_first: FloatTensor<Self>, others: Others, index: usize) -> FloatTensor<Self> {
                others.take::<Self>(index)
            }
        }
    };
}

output_ops!(Flex);
#[cfg(feature = "cuda")]
output_ops!(burn::backend::Cube);

/// Parent: the first output, to which no gradient flows from here.
#[derive(Debug)]
struct Other;

impl<B: Backend> Backward<B, 1> for Other {
    type State = (Others, usize);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (grad, (others, index)) = (grads.consume::<B>(&ops.node), ops.state);
        others.put_gradient::<B>(index, grad);
    }
}

impl<B: Backend, C: CheckpointStrategy> OutputOps for Autodiff<B, C> {
    fn op_other(first: FloatTensor<Self>, others: Others, index: usize) -> FloatTensor<Self> {
        let ((_, node), value) = (first.into_parts(), others.take::<B>(index));
        match Other.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((others, index), value),
            OpsKind::UnTracked(prep) => prep.finish(value),
        }
    }
}
