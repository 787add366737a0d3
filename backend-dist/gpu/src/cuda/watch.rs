//! The number of kernel compilations while the ranks start, and the number and time of GEMM plans.
//!
//! CubeCL counts compilations while an override of its process mode is open, and does not time them.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use cubecl_runtime::execution::{ProcessMode, ProcessModeOverride, StatisticsCollector};
use parking_lot::Mutex;

/// Open from the launch to the end of the first step.
static OPEN: Mutex<Option<(StatisticsCollector, ProcessModeOverride)>> = Mutex::new(None);

/// Begins to count, once.
pub fn begin() {
    OPEN.lock().get_or_insert_with(|| {
        let collector = StatisticsCollector::new();
        // `Execute` is the default.
        let counts = ProcessModeOverride::new(ProcessMode::Execute, &collector);
        (collector, counts)
    });
}

/// How many kernels were compiled and how many loaded from disk. The first rank to ask ends the counting for all.
pub fn kernels() -> (usize, usize) {
    static LAST: Mutex<(usize, usize)> = Mutex::new((0, 0));
    let mut last = LAST.lock();
    if let Some((collector, _)) = OPEN.lock().take() {
        let kernels = collector.statistics().compilation;
        *last = (kernels.compiled, kernels.loaded);
    }
    *last
}

static PLANNED: AtomicUsize = AtomicUsize::new(0);
static PLANNING: AtomicU64 = AtomicU64::new(0);

/// Plans a GEMM by `work`.
pub(super) fn planning<T>(work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let plan = work();
    PLANNED.fetch_add(1, Relaxed);
    PLANNING.fetch_add(start.elapsed().as_micros() as u64, Relaxed);
    plan
}

/// The GEMMs planned so far, and the seconds of all threads.
pub fn gemms() -> (usize, f64) {
    (PLANNED.load(Relaxed), PLANNING.load(Relaxed) as f64 / 1e6)
}
