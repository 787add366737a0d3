//! Page-locked host memory that DMA copy engines read and write while the GPU computes: copies of GPU buffers, and states
//! that live on the host ([`OffloadMemory`]), activations that wait there ([`ActivationMemory`]).
//!
//! A copy is queued on a stream of its own, behind what the rank's thread has launched. Nobody waits for it but who
//! reads the bytes, and the compute stream before the buffers are written again ([`HostMemory::protect`]). Page-locked
//! memory takes seconds to allocate, so a rank keeps it.

mod activations;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod locked;
#[cfg(not(feature = "cuda"))]
mod none;
#[cfg(feature = "cuda")]
mod offload;
#[cfg(feature = "cuda")]
mod pages;

pub use activations::{ActivationMemory, HostActivation, ReturningActivation};
#[cfg(feature = "cuda")]
pub use cuda::{HostBytes, HostCopy, HostMemory};
#[cfg(not(feature = "cuda"))]
pub use none::{HostBytes, HostCopy, HostMemory, OffloadMemory};
#[cfg(feature = "cuda")]
pub use offload::OffloadMemory;

pub use layouts::sizes::{LENT, PIECE, SLOTS};

/// Bytes that each buffer takes in host memory: a multiple of what any element type is aligned to.
pub fn held(bytes: usize) -> usize {
    bytes.next_multiple_of(256)
}
