//! Which process passes the outcome of a collective on to which: a tree over all processes, with process 0 at its root.

use std::collections::BTreeMap;
use std::ops::Range;

/// Processes that one process passes things on to. Up to nine processes are a star.
pub(crate) const CHILDREN: usize = 8;

/// The process above `process`, which is not 0.
pub(crate) fn parent(process: usize) -> usize {
    (process - 1) / CHILDREN
}

/// The processes directly below `process`.
pub(crate) fn children(process: usize, processes: usize) -> Range<usize> {
    let first = CHILDREN * process + 1;
    first.min(processes)..(first + CHILDREN).min(processes)
}

/// To which processes process 0 itself sends what all of `to` are to have, and whom each of them serves, which may be
/// itself. `is_linked` says of a process not directly below process 0 whether the one above it can send to it; few
/// processes need no detour.
pub(super) fn routes(to: &[usize], is_linked: impl Fn(usize) -> bool) -> BTreeMap<usize, Vec<usize>> {
    let mut routes = BTreeMap::<usize, Vec<usize>>::new();
    for &target in to {
        let mut first = target;
        while to.len() > CHILDREN && first > CHILDREN && is_linked(first) {
            first = parent(first);
        }
        routes.entry(first).or_default().push(target);
    }
    routes
}

/// The process directly below `process` through which `target` is reached, if it is below it.
fn next(process: usize, target: usize) -> Option<usize> {
    let mut child = target;
    while child > process {
        let above = parent(child);
        if above == process {
            return Some(child);
        }
        child = above;
    }
    None
}

/// Whom `process` sends what is meant for `to`, and whom each of them serves.
pub(super) fn below(process: usize, to: &[usize]) -> BTreeMap<usize, Vec<usize>> {
    let mut below = BTreeMap::<usize, Vec<usize>>::new();
    for &target in to {
        if let Some(child) = next(process, target) {
            below.entry(child).or_default().push(target);
        }
    }
    below
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn nine_processes_are_a_star_and_more_a_tree() {
        assert_eq!((children(0, 9), children(1, 9)), (1..9, 9..9));
        assert_eq!((children(0, 32), children(1, 32), children(3, 32), children(4, 32)), (1..9, 9..17, 25..32, 32..32));
        let all: Vec<usize> = (1..512).collect();
        let routes = routes(&all, |_| true);
        assert_eq!(routes.keys().copied().collect::<Vec<_>>(), (1..9).collect::<Vec<_>>());
    }

    proptest! {
        /// Everybody gets it once, over connections that exist.
        #[test]
        fn each_target_is_reached_once(
            to in proptest::collection::btree_set(1usize..600, 0..80),
            unlinked in proptest::collection::btree_set(9usize..600, 0..40),
        ) {
            let to: Vec<usize> = to.into_iter().collect();
            let is_linked = |process: usize| !unlinked.contains(&process);
            let (mut reached, mut open) = (BTreeSet::new(), Vec::new());
            let routes = routes(&to, is_linked);
            prop_assert!(!unlinked.is_empty() || routes.len() <= CHILDREN);
            open.extend(routes);
            while let Some((process, to)) = open.pop() {
                if to.contains(&process) {
                    prop_assert!(reached.insert(process));
                }
                for (child, to) in below(process, &to) {
                    prop_assert!(is_linked(child) && children(process, 600).contains(&child));
                    open.push((child, to));
                }
            }
            prop_assert_eq!(reached.into_iter().collect::<Vec<_>>(), to);
        }
    }
}
