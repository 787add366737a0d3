//! Whether two runs are bit-identical.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

static ON: AtomicBool = AtomicBool::new(false);

/// From now on, whether every operation of the process sums in a fixed order. If off, only dQ of attention with
/// head_dim 128 on GPUs is accumulated in arbitrary order, which is about 10 % faster.
pub fn deterministic(on: bool) {
    ON.store(on, Relaxed);
}

#[cfg(feature = "cuda")]
pub(super) fn is_deterministic() -> bool {
    ON.load(Relaxed)
}
