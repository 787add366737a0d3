//! The counters, and which of them the current thread's allocations go to.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// Ranks with counters of their own; memory of further ranks of the process is counted as nobody's.
pub const MAX_RANKS: usize = 1024;

/// Bytes held now, and the most since the last reset. Relaxed order is enough: each counter is exact by itself, since a
/// block's free happens after its allocation, and whoever reads a rank's counters has synchronized with that rank by
/// other means. A rank's counters lie apart from the others' in the cache.
#[repr(align(128))]
struct Gauge {
    live: AtomicUsize,
    peak: AtomicUsize,
}

impl Gauge {
    const fn new() -> Self {
        Self { live: AtomicUsize::new(0), peak: AtomicUsize::new(0) }
    }

    fn add(&self, bytes: usize) {
        let live = self.live.fetch_add(bytes, Relaxed) + bytes;
        if live > self.peak.load(Relaxed) {
            self.peak.fetch_max(live, Relaxed);
        }
    }

    fn subtract(&self, bytes: usize) {
        self.live.fetch_sub(bytes, Relaxed);
    }

    fn reset(&self) {
        self.peak.store(self.live.load(Relaxed), Relaxed);
    }
}

/// Number 0 is nobody, number `r + 1` rank `r`.
static OWNERS: [Gauge; MAX_RANKS + 1] = [const { Gauge::new() }; MAX_RANKS + 1];

/// Whether a [`RankAllocator`](super::RankAllocator) is in use.
static COUNTING: AtomicBool = AtomicBool::new(false);

/// Where a block is counted, a number of `OWNERS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tag(pub usize);

thread_local! {
    // Constant and without a destructor: reading it neither allocates nor fails, whatever the thread is doing.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

impl Tag {
    pub fn current() -> Self {
        Self(CURRENT.get())
    }

    pub fn add(self, bytes: usize) {
        if !COUNTING.load(Relaxed) {
            COUNTING.store(true, Relaxed);
        }
        OWNERS[self.0].add(bytes);
    }

    pub fn subtract(self, bytes: usize) {
        OWNERS[self.0].subtract(bytes);
    }
}

/// Whether memory is counted: false in a program whose global allocator is another one.
pub fn is_counting() -> bool {
    COUNTING.load(Relaxed)
}

/// Says which rank the current thread works for from now on; `None` for nobody.
pub fn set_rank(rank: Option<usize>) {
    CURRENT.set(rank.map_or(0, owner));
}

fn owner(rank: usize) -> usize {
    if rank < MAX_RANKS { rank + 1 } else { 0 }
}

/// Bytes that a rank holds.
pub fn live(rank: usize) -> u64 {
    OWNERS[owner(rank)].live.load(Relaxed) as u64
}

/// The most bytes that a rank has held at once since its last [`reset_peak`].
pub fn peak(rank: usize) -> u64 {
    OWNERS[owner(rank)].peak.load(Relaxed) as u64
}

/// Starts looking for a new peak of a rank. The rank should not be allocating meanwhile.
pub fn reset_peak(rank: usize) {
    OWNERS[owner(rank)].reset();
}

/// Runs `f` with its allocations counted to no rank: what several ranks will hold together.
pub fn without_rank<T>(f: impl FnOnce() -> T) -> T {
    let _back = Back(CURRENT.replace(0));
    f()
}

/// Has the thread's allocations counted to this owner again.
struct Back(usize);

impl Drop for Back {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}
