//! Sharing rows among threads.

use std::{
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering},
};

/// Work, in nanoseconds on one core, from which a second thread pays for being woken.
const WORTH_SHARING: usize = 40_000;

/// How many parts to cut `n` rows of `picoseconds` each into: one if a single thread is as good.
pub(super) fn parts(n: usize, picoseconds: usize) -> usize {
    let threads = rayon::current_num_threads();
    if threads == 1 || n.saturating_mul(picoseconds) / 1000 < WORTH_SHARING {
        return 1;
    }
    // Two parts for each thread, so that one which starts late still finds work.
    (2 * threads).min(n)
}

/// Calls `f(part, rows)` for every one of `parts` consecutive ranges which make up `0..n`. The calling thread works
/// along with the pool; the partition depends on `n` and `parts` only.
pub(super) fn for_parts(n: usize, parts: usize, f: impl Fn(usize, Range<usize>) + Sync) {
    if parts <= 1 {
        return f(0, 0..n);
    }
    let next = AtomicUsize::new(0);
    let work = || {
        loop {
            let part = next.fetch_add(1, Ordering::Relaxed);
            if part >= parts {
                return;
            }
            f(part, n * part / parts..n * (part + 1) / parts);
        }
    };
    rayon::in_place_scope(|scope| {
        for _ in 1..rayon::current_num_threads().min(parts) {
            scope.spawn(|_| work());
        }
        work();
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_all_rows_once() {
        for (n, parts) in [(1, 1), (7, 4), (64, 8), (3, 3)] {
            let seen: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
            for_parts(n, parts, |_, rows| {
                rows.for_each(|i| {
                    seen[i].fetch_add(1, Ordering::Relaxed);
                })
            });
            assert!(seen.iter().all(|s| s.load(Ordering::Relaxed) == 1), "{n} rows in {parts} parts");
        }
    }

    #[test]
    fn little_work_stays_on_one_thread() {
        assert_eq!(parts(10, 1000), 1);
    }
}
