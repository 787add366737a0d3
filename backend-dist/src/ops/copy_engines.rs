//! Whether DMA copy engines transfer activations between GPUs.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

static ON: AtomicBool = AtomicBool::new(true);

/// From now on, whether DMA copy engines transfer the activations of tensor parallelism and the tokens of expert
/// parallelism between GPUs of this process with peer access. Overlapped GEMMs then keep all SMs. Otherwise NCCL's
/// kernels transfer them.
pub fn copy_engines(on: bool) {
    ON.store(on, Relaxed);
}

#[cfg(feature = "cuda")]
pub(crate) fn are_copy_engines_on() -> bool {
    ON.load(Relaxed)
}
