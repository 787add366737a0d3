//! The counters, and which of them the current thread's allocations go to.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use super::Kind;

/// Ranks with counters of their own; memory of further ranks of the process is [`unattributed`].
pub const MAX_RANKS: usize = 1024;

const KINDS: usize = Kind::ALL.len();

/// Bytes held now, and the most since the last reset. Relaxed order is enough: each counter is exact by itself, since a
/// block's free happens after its allocation, and whoever reads a rank's counters has synchronized with that rank by
/// other means.
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

/// A rank's counters, apart from the others' in the cache.
#[repr(align(128))]
struct Owner {
    total: Gauge,
    kinds: [Gauge; KINDS],
}

impl Owner {
    const fn new() -> Self {
        Self { total: Gauge::new(), kinds: [const { Gauge::new() }; KINDS] }
    }
}

/// Number 0 is nobody, number `r + 1` rank `r`.
static OWNERS: [Owner; MAX_RANKS + 1] = [const { Owner::new() }; MAX_RANKS + 1];

/// Whether a [`RankAllocator`](super::RankAllocator) is in use.
static COUNTING: AtomicBool = AtomicBool::new(false);

/// Where a block is counted: owner × kinds + kind.
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

    fn new(owner: usize, kind: Kind) -> Self {
        Self(owner * KINDS + kind as usize)
    }

    fn owner(self) -> usize {
        self.0 / KINDS
    }

    fn gauges(self) -> [&'static Gauge; 2] {
        let owner = &OWNERS[self.owner()];
        [&owner.total, &owner.kinds[self.0 % KINDS]]
    }

    pub fn add(self, bytes: usize) {
        if !COUNTING.load(Relaxed) {
            COUNTING.store(true, Relaxed);
        }
        self.gauges().into_iter().for_each(|gauge| gauge.add(bytes));
    }

    pub fn subtract(self, bytes: usize) {
        self.gauges().into_iter().for_each(|gauge| gauge.subtract(bytes));
    }
}

/// Whether memory is counted: false in a program whose global allocator is another one.
pub fn is_counting() -> bool {
    COUNTING.load(Relaxed)
}

/// Says which rank the current thread works for from now on; `None` for nobody.
pub fn set_rank(rank: Option<usize>) {
    CURRENT.set(Tag::new(rank.map_or(0, owner), Kind::Other).0);
}

fn owner(rank: usize) -> usize {
    if rank < MAX_RANKS { rank + 1 } else { 0 }
}

/// Bytes that a rank holds.
pub fn live(rank: usize) -> u64 {
    OWNERS[owner(rank)].total.live.load(Relaxed) as u64
}

/// The most bytes that a rank has held at once since its last [`reset_peak`].
pub fn peak(rank: usize) -> u64 {
    OWNERS[owner(rank)].total.peak.load(Relaxed) as u64
}

/// Bytes of one kind that a rank holds.
pub fn live_of(rank: usize, kind: Kind) -> u64 {
    OWNERS[owner(rank)].kinds[kind as usize].live.load(Relaxed) as u64
}

/// The most bytes of one kind that a rank has held at once since its last [`reset_peak`].
pub fn peak_of(rank: usize, kind: Kind) -> u64 {
    OWNERS[owner(rank)].kinds[kind as usize].peak.load(Relaxed) as u64
}

/// Starts looking for a new peak of a rank. The rank should not be allocating meanwhile.
pub fn reset_peak(rank: usize) {
    let Owner { total, kinds } = &OWNERS[owner(rank)];
    total.reset();
    kinds.iter().for_each(Gauge::reset);
}

/// Bytes that belong to no rank: what was allocated before the ranks started, and by the shared compute threads.
pub fn unattributed() -> u64 {
    OWNERS[0].total.live.load(Relaxed) as u64
}

/// While it lives, the current thread's allocations are of a kind. Scopes nest.
#[derive(Debug)]
pub struct OfKind {
    before: Tag,
    /// The counters are a thread's.
    _here: std::marker::PhantomData<*const ()>,
}

impl OfKind {
    /// From now on.
    #[must_use = "the scope ends when it is dropped"]
    pub fn begin(kind: Kind) -> Self {
        let before = Tag::current();
        CURRENT.set(Tag::new(before.owner(), kind).0);
        Self { before, _here: std::marker::PhantomData }
    }
}

impl Drop for OfKind {
    fn drop(&mut self) {
        CURRENT.set(self.before.0);
    }
}

/// Runs `f` with its allocations counted to no rank: what several ranks will hold together.
pub fn without_rank<T>(f: impl FnOnce() -> T) -> T {
    let before = OfKind::begin(Kind::Other);
    set_rank(None);
    let value = f();
    drop(before);
    value
}
