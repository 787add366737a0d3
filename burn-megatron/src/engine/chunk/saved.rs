//! What a forward pass saves of a segment for the backward pass.

use backend_dist::gpu::host_copy::{ActivationMemory, HostActivation, ReturningActivation};
use backend_dist::ops::weight_grads::Deferral;
use backend_dist::ops::{SavedAttention, Tape};
use burn::tensor::Tensor;

/// What is saved of a segment.
pub(super) struct SavedSegment {
    pub input: Input,
    /// With what defers its weight gradients; `None` where the segment is recomputed, or nothing in it has a gradient.
    pub tape: Option<(Tape, Deferral)>,
    /// Saved attention outputs, of attention that is not recomputed.
    pub attention: Option<SavedAttention>,
}

/// The input of a segment.
pub(super) enum Input {
    /// On the device; the leaf of the graph if there is one. `None` for the embedding.
    Here(Option<Tensor<3>>),
    /// In host memory.
    Host(HostActivation),
    /// On its way back.
    Returning(ReturningActivation),
}

impl Input {
    /// Starts to bring it back from the host, if it is there.
    pub fn prefetch(&mut self, memory: &mut ActivationMemory) {
        if let Self::Host(_) = self {
            let Self::Host(stored) = std::mem::replace(self, Self::Here(None)) else { unreachable!("it was, above") };
            *self = Self::Returning(memory.load(stored));
        }
    }

    /// The tensor on the device.
    pub fn take(mut self, memory: &mut ActivationMemory) -> Option<Tensor<3>> {
        self.prefetch(memory);
        match self {
            Self::Here(x) => x,
            Self::Returning(x) => Some(memory.take(x)),
            Self::Host(_) => unreachable!("it is on its way by now"),
        }
    }
}
