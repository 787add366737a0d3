//! An all-gather of small notes among the members of a group that several processes of one host run, in memory that
//! they share: microseconds instead of the network's.
//!
//! The order of operations is that of [`LocalAllGather`](crate::comm::local_all_gather::LocalAllGather): a member's notes
//! of an even and of an odd operation are enough.

use super::{Group, LONGEST, SharedMemory};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long a member spins before it sleeps between looks. Its peers are usually microseconds away.
const EAGER: Duration = Duration::from_micros(200);

/// How long it sleeps then.
const NAP: Duration = Duration::from_micros(50);

/// Bytes of a note with its number and its length.
const SLOT: usize = LONGEST + 16;

/// One member's view of the board.
pub(crate) struct SharedBoard {
    memory: SharedMemory,
    members: usize,
    member: usize,
}

impl SharedBoard {
    /// The board of `group`, all of whose members call this; `None` for all of them with the reason of the first that
    /// cannot take part.
    pub(crate) fn meet(group: &Group) -> Result<Self, String> {
        let memory = SharedMemory::meet(group, bytes(group.size()))?;
        Ok(Self { memory, members: group.size(), member: group.rank() })
    }

    /// Posts this member's `note` of operation `number` and waits for everybody's, which come back in group order;
    /// `None` if they are not complete when `is_over` says that nobody will come any more. Operations are numbered from
    /// 0 on.
    ///
    /// # Panics
    /// If the note is longer than [`LONGEST`].
    pub(crate) fn all_gather(&self, number: u64, note: &[u8], is_over: impl Fn() -> bool) -> Option<Vec<Vec<u8>>> {
        assert!(note.len() <= LONGEST, "a note of {} bytes", note.len());
        // An empty slot has the number 0.
        let number = number + 1;
        let (posted, length, at) = self.slot(self.member, number);
        // SAFETY: the slot is this member's, and its last reader has posted for a later operation. The number comes
        // after the note.
        unsafe { std::ptr::copy_nonoverlapping(note.as_ptr(), at, note.len()) };
        length.store(note.len() as u64, Ordering::Relaxed);
        posted.store(number, Ordering::Release);
        (0..self.members).map(|member| self.read(member, number, &is_over)).collect()
    }

    fn read(&self, member: usize, number: u64, is_over: impl Fn() -> bool) -> Option<Vec<u8>> {
        let (posted, length, at) = self.slot(member, number);
        let start = Instant::now();
        while posted.load(Ordering::Acquire) != number {
            if start.elapsed() < EAGER {
                std::hint::spin_loop();
            } else if is_over() {
                return None;
            } else {
                std::thread::sleep(NAP);
            }
        }
        let length = (length.load(Ordering::Relaxed) as usize).min(LONGEST);
        // SAFETY: within the slot, which its member writes again only after this one has posted for a later operation.
        Some(unsafe { std::slice::from_raw_parts(at, length) }.to_vec())
    }

    /// Number, length and bytes of a member's note.
    fn slot(&self, member: usize, number: u64) -> (&AtomicU64, &AtomicU64, *mut u8) {
        let start = SLOT * (2 * member + (number % 2) as usize);
        // SAFETY: the slot is within the memory, which lives as long as `self`, and aligned to its size; numbers and
        // lengths are accessed as atomics only.
        unsafe {
            let slot = self.memory.start().add(start);
            (AtomicU64::from_ptr(slot.cast()), AtomicU64::from_ptr(slot.add(8).cast()), slot.add(16))
        }
    }
}

/// Two slots for each member.
fn bytes(members: usize) -> usize {
    SLOT * 2 * members
}

#[cfg(all(test, target_os = "linux"))]
mod tests;
