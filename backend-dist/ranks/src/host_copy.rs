//! Copies of GPU buffers in page-locked host memory, made by a DMA copy engine while the GPU computes.
//!
//! A copy is queued on a stream of its own, behind what the rank's thread has launched. Nobody waits for it but who
//! reads the bytes, and the compute stream before the buffers are written again ([`HostMemory::protect`]). Page-locked
//! memory takes seconds to allocate, so a rank keeps it.

#[cfg(feature = "cuda")]
mod gpu;
#[cfg(not(feature = "cuda"))]
mod none;

#[cfg(feature = "cuda")]
pub use gpu::{HostBytes, HostCopy, HostMemory};
#[cfg(not(feature = "cuda"))]
pub use none::{HostBytes, HostCopy, HostMemory};

/// Bytes that each buffer takes in host memory: a multiple of what any element type is aligned to.
pub fn held(bytes: usize) -> usize {
    bytes.next_multiple_of(256)
}
