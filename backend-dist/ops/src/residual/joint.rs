//! State that operations on the residual stream share outside the graph.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::backend::{Backend, tensor::FloatTensor};

use crate::operation::Parents;
use crate::stash::{HandOvers, Stash};
use crate::step::Step;
use ranks::comm::Group;

/// The state at one point of the residual stream. Clones share it.
#[derive(Clone, Default)]
pub struct Joint {
    /// Forward: the norm of the stream, from the fused add to the operation that reads the norm.
    normed: Stash,
    /// Forward: a fused add was to leave the norm.
    is_promised: bool,
    /// Backward: whether a gradient of the stream is registered here.
    registered: Arc<AtomicBool>,
    /// Backward: whether the norm's node has run without one.
    is_passed: Arc<AtomicBool>,
    hand_overs: HandOvers,
}

/// An addition to the residual stream.
#[derive(Clone, Debug)]
pub struct ResidualAdd {
    /// Whose partial sums are added, if they are not summed yet.
    pub group: Option<Group>,
    /// The joint of the stream that is added to.
    pub input: Joint,
    /// The norm that reads the sum, or none.
    pub step: Step,
    /// The joint of the sum.
    pub output: Joint,
}

impl Joint {
    /// At the entry of a block.
    pub fn new(hand_overs: &HandOvers) -> Self {
        Self { normed: Stash::counted(hand_overs), hand_overs: hand_overs.clone(), ..Self::default() }
    }

    /// After an addition, which leaves the norm `step`.
    pub fn next(&self, step: Step) -> Self {
        Self { is_promised: step.is_norm(), ..Self::new(&self.hand_overs) }
    }

    /// Stores the normalised stream for its reader.
    pub fn put_normed<B: Backend>(&self, normed: FloatTensor<B>) {
        self.normed.put(normed);
    }

    /// Takes the normalised stream out.
    pub fn take_normed<B: Backend>(&self) -> Option<FloatTensor<B>> {
        let normed = self.normed.take();
        if self.is_promised && normed.is_none() {
            self.hand_overs.miss();
        }
        normed
    }

    /// Marks that a gradient of the stream is registered. The mark stays: whoever takes the gradient registers a sum
    /// with it.
    pub fn mark_registered(&self) {
        self.registered.store(true, Ordering::Relaxed);
        if self.is_passed.load(Ordering::Relaxed) {
            self.hand_overs.miss();
        }
    }

    /// Takes the gradient of the stream, the first parent, out of those that are registered, if it is. Nodes run from
    /// the last to the first, so the addition after a norm has run before the norm does, if it runs at all.
    pub fn take_gradient<B: Backend, const N: usize>(
        &self,
        Parents { ops, grads }: &mut Parents<'_, N>,
    ) -> Option<FloatTensor<B>> {
        let node = ops.parents[0].as_ref()?;
        if !self.registered.load(Ordering::Relaxed) {
            self.is_passed.store(true, Ordering::Relaxed);
            return None;
        }
        // A leaf requires more than an inner node: its gradient can only be read, not taken.
        let may_be_taken = node.requirement == ops.node.requirement;
        if !may_be_taken {
            self.hand_overs.miss();
        }
        may_be_taken.then(|| grads.consume::<B>(node))
    }
}

impl fmt::Debug for Joint {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("Joint")
    }
}
