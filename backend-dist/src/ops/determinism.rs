//! Whether two runs give the same bits.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

static ON: AtomicBool = AtomicBool::new(false);

/// From now on, whether every operation takes its sums in one order, in all threads of the process. Without, attention
/// on GPUs with heads of 128 adds up the gradients of the queries as they come, which is about a tenth faster; all else
/// has one order unless products are tuned (`cache::tune_products`).
pub fn deterministic(on: bool) {
    ON.store(on, Relaxed);
}

#[cfg(feature = "cuda")]
pub(super) fn is_deterministic() -> bool {
    ON.load(Relaxed)
}
