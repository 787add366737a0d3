//! The gradient of a tensor that two linear layers read, as a frozen weight and its adapter do.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::backend::{
    Backend,
    autodiff::{grads::Gradients, ops::Ops},
    tensor::FloatTensor,
};

/// The input of two linear layers. The GEMM of the one that runs last in the backward pass adds to the gradient that the
/// other has left, which saves a pass over both. Clones are the same input.
#[derive(Clone, Debug, Default)]
pub struct SharedInput(Arc<AtomicBool>);

impl SharedInput {
    /// Takes the gradient that the other layer has registered for the first parent of `ops` out of `grads`. `None` if
    /// this layer is the first of the two, or the input is a leaf, whose gradient can only be read.
    pub(super) fn earlier<B: Backend, S, const N: usize>(
        &self,
        ops: &Ops<S, N>,
        grads: &mut Gradients,
    ) -> Option<FloatTensor<B>> {
        let node = ops.parents[0].as_ref()?;
        let is_last = self.0.swap(true, Ordering::Relaxed);
        (is_last && node.requirement == ops.node.requirement).then(|| grads.consume::<B>(node))
    }
}
