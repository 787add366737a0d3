//! The gradient of a tensor that two linear layers read, as a frozen weight and its adapter do.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::backend::{Backend, tensor::FloatTensor};

use super::stash::Stash;

/// The input of two linear layers, whose outputs are both used. The layer that runs first in the backward pass, which is
/// the last in the forward pass, leaves its GEMM to the other, unless that has collectives or is in FP8. The other has it add
/// to its own gradient: a sum of both would be a pass over memory more. Clones are the same input.
#[derive(Clone, Debug, Default)]
pub struct SharedInput {
    was_read: Arc<AtomicBool>,
    left: Stash,
}

/// Adds a layer's gradient of its input to the other layer's.
type AddGrad<B> = Box<dyn FnOnce(FloatTensor<B>) -> FloatTensor<B> + Send>;

impl SharedInput {
    /// Whether the layer that asks is the first of the two in the backward pass.
    pub(super) fn is_first(&self) -> bool {
        !self.was_read.swap(true, Ordering::Relaxed)
    }

    /// Leaves a gradient to the second layer.
    pub(super) fn leave<B: Backend>(&self, add: impl FnOnce(FloatTensor<B>) -> FloatTensor<B> + Send + 'static) {
        self.left.put::<AddGrad<B>>(Box::new(add));
    }

    /// The second layer's gradient `own` with what the first has left, if it has left something.
    pub(super) fn with_left<B: Backend>(&self, own: FloatTensor<B>) -> FloatTensor<B> {
        match self.left.take::<AddGrad<B>>() {
            Some(add) => add(own),
            None => own,
        }
    }
}
