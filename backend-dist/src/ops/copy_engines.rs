//! Who carries activations between GPUs.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

static ON: AtomicBool = AtomicBool::new(true);

/// From now on, whether copy engines carry the activations of tensor parallelism and the rows of tokens that go to
/// experts, between GPUs of this process which reach each other's memory, so that products beside keep all
/// multiprocessors; else NCCL's kernels do.
pub fn copy_engines(on: bool) {
    ON.store(on, Relaxed);
}

#[cfg(feature = "cuda")]
pub(crate) fn are_copy_engines_on() -> bool {
    ON.load(Relaxed)
}
