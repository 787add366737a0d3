//! The counters, and the owner of the current thread's allocations.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// Ranks with separate counters; memory of further ranks of the process is counted as that of no rank.
pub const MAX_RANKS: usize = 1024;

/// Bytes held now, and the peak since the last reset. Relaxed order is enough: each counter is exact by itself, since a
/// block's free happens after its allocation, and the reader of a rank's counters has synchronized with that rank by
/// other means. Ranks' counters are in separate cache lines.
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

/// Index 0 is no rank, index `r + 1` is rank `r`.
static OWNERS: [Gauge; MAX_RANKS + 1] = [const { Gauge::new() }; MAX_RANKS + 1];

/// Whether a [`RankAllocator`](super::RankAllocator) is in use.
static COUNTING: AtomicBool = AtomicBool::new(false);

/// The owner of a block, an index of `OWNERS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tag(pub usize);

thread_local! {
    // Constant and without a destructor: reading it neither allocates nor fails, in any state of the thread.
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

/// Sets the rank of the current thread; `None` for no rank.
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

/// The peak bytes of a rank since its last [`reset_peak`].
pub fn peak(rank: usize) -> u64 {
    OWNERS[owner(rank)].peak.load(Relaxed) as u64
}

/// Resets the peak of a rank. The rank should not be allocating meanwhile.
pub fn reset_peak(rank: usize) {
    OWNERS[owner(rank)].reset();
}

/// Runs `f` with its allocations counted to no rank: for memory that several ranks share.
pub fn without_rank<T>(f: impl FnOnce() -> T) -> T {
    let _back = Back(CURRENT.replace(0));
    f()
}

/// Restores the owner of the thread's allocations.
struct Back(usize);

impl Drop for Back {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}
