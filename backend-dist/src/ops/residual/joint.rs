//! State that operations on the residual stream share outside the graph.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::{
    Backend,
    autodiff::{grads::Gradients, ops::Ops},
    tensor::FloatTensor,
};

use crate::ops::prologue::Step;

/// The state at one point of the residual stream. Clones share it.
#[derive(Clone, Default)]
pub struct Joint {
    /// Forward: the norm of the stream, from the fused add to the operation that reads the norm.
    normed: Arc<Mutex<Option<Box<dyn Any + Send>>>>,
    /// Backward: whether a gradient of the stream is registered here.
    registered: Arc<AtomicBool>,
}

/// An addition to the residual stream.
#[derive(Clone, Debug)]
pub struct ResidualAdd {
    /// The joint of the stream that is added to.
    pub input: Joint,
    /// The norm that reads the sum, or none.
    pub step: Step,
    /// The joint of the sum.
    pub output: Joint,
}

impl Joint {
    /// Stores the normalised stream for its reader.
    pub fn put_normed<B: Backend>(&self, normed: FloatTensor<B>) {
        *self.normed.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(normed));
    }

    /// Takes the normalised stream out.
    pub fn take_normed<B: Backend>(&self) -> Option<FloatTensor<B>> {
        let normed = self.normed.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        normed.downcast().ok().map(|normed| *normed)
    }

    /// Marks that a gradient of the stream is registered. The mark stays: whoever takes the gradient registers a sum
    /// with it.
    pub fn mark_registered(&self) {
        self.registered.store(true, Ordering::Relaxed);
    }

    /// Takes the gradient of the stream, the first parent of `ops`, out of `grads`, if one is registered. Nodes run
    /// from the last to the first, so the addition after a norm has run before the norm does, if it runs at all.
    pub fn take_gradient<B: Backend, S, const N: usize>(
        &self,
        ops: &Ops<S, N>,
        grads: &mut Gradients,
    ) -> Option<FloatTensor<B>> {
        let node = ops.parents[0].as_ref()?;
        // A leaf requires more than an inner node: its gradient can only be read, not taken.
        let may_be_taken = node.requirement == ops.node.requirement;
        (may_be_taken && self.registered.load(Ordering::Relaxed)).then(|| grads.consume::<B>(node))
    }
}

impl fmt::Debug for Joint {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("Joint")
    }
}
