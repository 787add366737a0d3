//! An all-gather of small notes among the members of a group that one process hosts, without the lock of the world.
//!
//! A member posts its note of operation `n` and then reads everybody's. So whoever posts for operation `n + 1` knows
//! that all have posted for `n`, and whoever posts for `n + 2` that all have read `n`: two notes of each member are
//! enough.

use parking_lot::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// How long a member spins before it sleeps. Its peers are usually microseconds away.
const EAGER: Duration = Duration::from_micros(100);

/// How long it sleeps before it asks whether the run has ended.
const NAP: Duration = Duration::from_millis(20);

/// Number of an operation and a member's note of it, for even and for odd numbers.
type Notes<T> = [Option<(u64, T)>; 2];

pub(crate) struct LocalAllGather<T> {
    notes: Mutex<Vec<Notes<T>>>,
    changed: Condvar,
}

impl<T: Clone> LocalAllGather<T> {
    pub(crate) fn new(members: usize) -> Self {
        Self { notes: Mutex::new((0..members).map(|_| [None, None]).collect()), changed: Condvar::new() }
    }

    /// Posts `member`'s `note` of operation `number` and waits for everybody's, which come back in group order; `None`
    /// if they are not complete when `is_over` says that nobody will come any more.
    pub(crate) fn all_gather(&self, member: usize, number: u64, note: T, is_over: impl Fn() -> bool) -> Option<Vec<T>> {
        let slot = usize::from(number % 2 == 1);
        let mut notes = self.notes.lock();
        notes[member][slot] = Some((number, note));
        self.changed.notify_all();
        let start = Instant::now();
        loop {
            let note = |notes: &Notes<T>| match &notes[slot] {
                Some((found, note)) if *found == number => Some(note.clone()),
                _ => None,
            };
            if let Some(all) = notes.iter().map(note).collect() {
                return Some(all);
            }
            if start.elapsed() < EAGER {
                drop(notes);
                std::hint::spin_loop();
                notes = self.notes.lock();
            } else {
                self.changed.wait_for(&mut notes, NAP);
                if is_over() {
                    return None;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_read_what_all_have_posted_for_the_same_operation() {
        let (members, operations) = (4, 2000);
        let gather = LocalAllGather::new(members);
        std::thread::scope(|scope| {
            for member in 0..members {
                let gather = &gather;
                scope.spawn(move || {
                    for number in 0..operations {
                        let all = gather.all_gather(member, number, (member, number), || false);
                        let expected: Vec<_> = (0..members).map(|member| (member, number)).collect();
                        assert_eq!(all, Some(expected));
                    }
                });
            }
        });
    }

    #[test]
    fn nobody_waits_for_a_member_that_will_not_come() {
        let gather = LocalAllGather::new(2);
        assert_eq!(gather.all_gather(0, 0, "here", || true), None);
    }
}
