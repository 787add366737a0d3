//! Splitting rows among threads.

use std::{
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering},
};

/// Nanoseconds of work on one core from which waking a second thread pays.
const WORTH_SHARING: usize = 40_000;

/// The number of parts for `n` rows of `picoseconds` each: 1 if a single thread is as fast.
pub(super) fn parts(n: usize, picoseconds: usize) -> usize {
    let threads = rayon::current_num_threads();
    if threads == 1 || n.saturating_mul(picoseconds) / 1000 < WORTH_SHARING {
        return 1;
    }
    // Two parts per thread, so that a thread that starts late still finds work.
    (2 * threads).min(n)
}

/// Calls `f(part, rows)` for each of `parts` consecutive ranges that make up `0..n`. The calling thread works too; the
/// partition depends on `n` and `parts` only.
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
