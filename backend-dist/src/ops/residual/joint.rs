//! What operations on one place of the residual stream leave for each other.

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

/// A place of the residual stream. Clones are the same place.
#[derive(Clone, Default)]
pub struct Joint {
    /// Forward: the norm of the place, from the sum to the operation behind the norm.
    normed: Arc<Mutex<Option<Box<dyn Any + Send>>>>,
    /// Backward: whether a gradient of the place is registered.
    registered: Arc<AtomicBool>,
}

/// A sum in the residual stream.
#[derive(Clone, Debug)]
pub struct Sum {
    /// The place that is added to.
    pub of: Joint,
    /// The norm behind the sum, or none.
    pub step: Step,
    /// The place of the sum.
    pub to: Joint,
}

impl Joint {
    /// Leaves the norm of the place for the operation that needs it.
    pub fn put_normed<B: Backend>(&self, normed: FloatTensor<B>) {
        *self.normed.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(normed));
    }

    /// The norm of the place, which is kept here no longer.
    pub fn take_normed<B: Backend>(&self) -> Option<FloatTensor<B>> {
        let normed = self.normed.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        normed.downcast().ok().map(|normed| *normed)
    }

    /// Says that a gradient of the place is registered. It stays so: who takes it registers a sum with it.
    pub fn mark_registered(&self) {
        self.registered.store(true, Ordering::Relaxed);
    }

    /// Takes the gradient of the place, the first parent of `ops`, out of `grads`, if there is one yet. Nodes run from
    /// the last to the first, so that the sum behind a norm has run when the norm does, if it runs at all.
    pub fn take_gradient<B: Backend, S, const N: usize>(
        &self,
        ops: &Ops<S, N>,
        grads: &mut Gradients,
    ) -> Option<FloatTensor<B>> {
        let node = ops.parents[0].as_ref()?;
        // Of a leaf, which requires more than a node within the graph, a gradient can only be read.
        let may_be_taken = node.requirement == ops.node.requirement;
        (may_be_taken && self.registered.load(Ordering::Relaxed)).then(|| grads.consume::<B>(node))
    }
}

impl fmt::Debug for Joint {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("Joint")
    }
}
