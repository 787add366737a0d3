//! The amax of a tensor, and its cast, from the operation that writes it to the layer in FP8 that reads it.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use burn::backend::{Backend, tensor::FloatTensor};

use super::kernels::{Matrix, Scales};
use crate::kernels::LocalKernels;
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

/// The gradient of an output as its writer has cast it.
pub(super) struct CastGradient<B: LocalKernels> {
    pub scales: Scales<B>,
    pub by_rows: Matrix<B>,
}

/// What the writer of an output's gradient leaves for the layer. Clones are of the same gradient.
#[derive(Clone, Debug)]
pub(super) struct GradientNotes {
    pub amax: KnownAmax,
    /// A [`CastGradient`].
    pub cast: Stash,
    /// The layer has computed the output in FP8, and so reads them.
    pub is_read: Arc<AtomicBool>,
}

impl GradientNotes {
    /// Notes that the layer does not read are counted.
    pub fn new(hand_overs: &HandOvers) -> Self {
        Self { amax: KnownAmax::new(hand_overs), cast: Stash::counted(hand_overs), is_read: Arc::default() }
    }
}
