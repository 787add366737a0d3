//! The amax of a tensor, from the operation that writes it to the layer in FP8 that reads it.

use burn::backend::{Backend, tensor::FloatTensor};

use crate::stash::{HandOvers, Stash};

/// The amax of one tensor, `[1]`, which its writer may have found on the way. Clones are of the same tensor, which has one
/// reader and is written once.
#[derive(Clone, Debug, Default)]
pub struct KnownAmax(Stash);

impl KnownAmax {
    /// An amax that its reader does not take is counted.
    pub fn new(hand_overs: &HandOvers) -> Self {
        Self(Stash::counted(hand_overs))
    }

    /// Leaves the amax, if it was found, for a reader, if there is one.
    pub(crate) fn note<B: Backend>(reader: &Option<Self>, amax: Option<FloatTensor<B>>) {
        if let (Some(Self(stash)), Some(amax)) = (reader, amax) {
            stash.put(amax);
        }
    }

    /// Takes the amax, if there is one.
    pub(super) fn take<B: Backend>(&self) -> Option<FloatTensor<B>> {
        self.0.take()
    }
}
