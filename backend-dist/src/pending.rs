//! Collectives on their way, between GPUs and on logical devices.

#[cfg(feature = "decorator")]
use crate::mesh_backend::async_collectives::Work;
#[cfg(feature = "cuda")]
use ranks::overlap;
#[cfg(feature = "decorator")]
use std::sync::Arc;

/// What a tensor waits for before it is used.
pub(crate) enum Pending {
    /// Nothing.
    Done,
    #[cfg(feature = "cuda")]
    Gpu(overlap::Pending),
    /// Of all tensors that come together.
    #[cfg(feature = "decorator")]
    Logical(Arc<Work>),
}

impl Pending {
    /// What is computed from now on comes after it.
    pub fn wait(self) {
        match self {
            Self::Done => {}
            #[cfg(feature = "cuda")]
            Self::Gpu(pending) => pending.wait(),
            #[cfg(feature = "decorator")]
            Self::Logical(work) => work.wait(),
        }
    }
}
