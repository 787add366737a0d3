//! The number and time of kernel compilations and GEMM plans while the ranks start.
//!
//! CubeCL counts compilations when they begin and end, while an override of its process mode is open, but does not time
//! them. A thread checks every millisecond whether one is in progress.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use cubecl_runtime::execution::{ProcessMode, ProcessModeOverride, StatisticsCollector};
use parking_lot::Mutex;

/// The polling interval.
const EVERY: Duration = Duration::from_millis(1);

/// The open override, from the launch to the end of the first step.
static OPEN: Mutex<Option<Watch>> = Mutex::new(None);

struct Watch {
    collector: StatisticsCollector,
    shared: Arc<Shared>,
    _counts: ProcessModeOverride,
}

/// What the watching thread and the launch share.
#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    micros: AtomicU64,
}

/// Begins to count, once.
pub fn begin() {
    let mut open = OPEN.lock();
    if open.is_some() {
        return;
    }
    let collector = StatisticsCollector::new();
    // `Execute` is the default.
    let counts = ProcessModeOverride::new(ProcessMode::Execute, &collector);
    let (shared, reader) = (Arc::<Shared>::default(), collector.reader());
    let watched = shared.clone();
    let watch = move || {
        let mut last = Instant::now();
        while !watched.stop.load(Relaxed) {
            std::thread::sleep(EVERY);
            let (now, kernels) = (Instant::now(), reader.statistics().compilation);
            if kernels.registered > kernels.settled() {
                watched.micros.fetch_add((now - last).as_micros() as u64, Relaxed);
            }
            last = now;
        }
    };
    // Without the thread there are counts and no times.
    let _ = std::thread::Builder::new().name("kernel watch".into()).spawn(watch);
    *open = Some(Watch { collector, shared, _counts: counts });
}

/// What was made so far: newly, from disk, and in how many seconds.
pub type Made = (usize, usize, f64);

/// The compilations so far. The first rank to ask ends the counting for all.
pub fn kernels() -> Made {
    static LAST: Mutex<Option<Made>> = Mutex::new(None);
    let mut last = LAST.lock();
    if let Some(watch) = OPEN.lock().take() {
        watch.shared.stop.store(true, Relaxed);
        let kernels = watch.collector.statistics().compilation;
        let seconds = watch.shared.micros.load(Relaxed) as f64 / 1e6;
        *last = Some((kernels.compiled, kernels.loaded, seconds));
    }
    last.unwrap_or_default()
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
pub fn gemms() -> Made {
    (PLANNED.load(Relaxed), 0, PLANNING.load(Relaxed) as f64 / 1e6)
}
