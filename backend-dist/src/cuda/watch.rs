//! How many kernels are compiled and products planned while the ranks start, and how long that takes.
//!
//! CubeCL counts kernels when their compilation begins and when it ends, while an override of its process mode is open,
//! and takes no time; a thread looks every millisecond whether there is one that has begun and not ended.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cubecl_runtime::execution::{ProcessMode, ProcessModeOverride, StatisticsCollector};

use crate::startup::Made;

/// Between two looks.
const EVERY: Duration = Duration::from_millis(1);

/// The override that is open, from the launch to the end of the first step.
static OPEN: Mutex<Option<Watch>> = Mutex::new(None);

struct Watch {
    collector: StatisticsCollector,
    seen: Arc<Seen>,
    _counts: ProcessModeOverride,
}

#[derive(Default)]
struct Seen {
    stop: AtomicBool,
    micros: AtomicU64,
}

/// Begins to count, unless that has begun.
pub(crate) fn begin() {
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if open.is_some() {
        return;
    }
    let collector = StatisticsCollector::new();
    // `Execute` is what the process does anyway.
    let counts = ProcessModeOverride::new(ProcessMode::Execute, &collector);
    let (seen, reader) = (Arc::<Seen>::default(), collector.reader());
    let watched = seen.clone();
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
    // Without the thread there are counts and no seconds.
    let _ = std::thread::Builder::new().name("kernel watch".into()).spawn(watch);
    *open = Some(Watch { collector, seen, _counts: counts });
}

/// What has been compiled so far. The first rank to ask ends the counting, for all.
pub(crate) fn kernels() -> Made {
    static LAST: Mutex<Option<Made>> = Mutex::new(None);
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(watch) = OPEN.lock().unwrap_or_else(PoisonError::into_inner).take() {
        watch.seen.stop.store(true, Relaxed);
        let kernels = watch.collector.statistics().compilation;
        let seconds = watch.seen.micros.load(Relaxed) as f64 / 1e6;
        *last = Some(Made { count: kernels.compiled, cached: kernels.loaded, seconds });
    }
    last.unwrap_or_default()
}

static PLANNED: AtomicUsize = AtomicUsize::new(0);
static CACHED: AtomicUsize = AtomicUsize::new(0);
static PLANNING: AtomicU64 = AtomicU64::new(0);

/// Plans a matrix product by `work`.
pub(super) fn planning<T>(work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let plan = work();
    PLANNED.fetch_add(1, Relaxed);
    PLANNING.fetch_add(start.elapsed().as_micros() as u64, Relaxed);
    plan
}

/// The algorithm of the product planned last was chosen in an earlier run, or by another rank.
pub(super) fn from_disk() {
    CACHED.fetch_add(1, Relaxed);
}

/// The products planned so far, and the seconds of all threads.
pub(crate) fn products() -> Made {
    let cached = CACHED.load(Relaxed);
    let count = PLANNED.load(Relaxed).saturating_sub(cached);
    Made { count, cached, seconds: PLANNING.load(Relaxed) as f64 / 1e6 }
}
