//! An all-gather of small notes among the members of a group that several processes of one host run, in memory that
//! they share: microseconds instead of the network's.
//!
//! The first member creates an unnamed file in memory (memfd), which the others open through `/proc`: the system lets
//! processes of the same user do so, and nobody has to delete anything, however the run ends. The order of operations
//! is that of [`LocalAllGather`](crate::comm::local_all_gather::LocalAllGather): a member's notes of an even and of an odd
//! operation are enough.

use super::{Group, LONGEST, agree};
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long a member spins before it sleeps between looks. Its peers are usually microseconds away.
const EAGER: Duration = Duration::from_micros(200);

/// How long it sleeps then.
const NAP: Duration = Duration::from_micros(50);

/// Bytes of the identity, and of a note with its number and its length.
const TOKEN: usize = 32;
const SLOT: usize = LONGEST + 16;

/// Where a board is found, and its identity: another container may have another process of this number.
#[derive(Clone, Serialize, Deserialize)]
struct Place {
    process: u32,
    file: i32,
    token: [u8; TOKEN],
}

/// One member's view of the board.
pub(crate) struct SharedBoard {
    memory: MmapRaw,
    members: usize,
    member: usize,
}

impl SharedBoard {
    /// The board of `group`, all of whose members call this; `None` for all of them with the reason of the first that
    /// cannot take part.
    pub(crate) fn meet(group: &Group) -> Result<Self, String> {
        let created = (group.rank() == 0).then(|| create(group.size()));
        let place =
            created.as_ref().map(|created| created.as_ref().map(|(_, place)| place.clone()).map_err(String::clone));
        let place: Result<Place, String> = group.broadcast_host(place, 0);
        let opened = place.and_then(|place| Self::open(&place, group.size(), group.rank()));
        // The file stays until all have opened it.
        agree(group, opened)
    }

    fn open(place: &Place, members: usize, member: usize) -> Result<Self, String> {
        let path = format!("/proc/{}/fd/{}", place.process, place.file);
        let file = OpenOptions::new().read(true).write(true).open(path);
        let file =
            file.map_err(|error| format!("the memory of process {} cannot be opened: {error}", place.process))?;
        let other = || format!("process {} is another one here, as in another container", place.process);
        if file.metadata().map_or(0, |about| about.len()) != bytes(members) as u64 {
            return Err(other());
        }
        let memory = map(&file, members)?;
        // SAFETY: the file is longer, and its first bytes were written before its place was told.
        let token = unsafe { std::slice::from_raw_parts(memory.as_ptr(), TOKEN) };
        if token == place.token { Ok(Self { memory, members, member }) } else { Err(other()) }
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
        let start = SLOT * (1 + 2 * member + (number % 2) as usize);
        // SAFETY: the slot is within the memory, which lives as long as `self`, and aligned to its size; numbers and
        // lengths are accessed as atomics only.
        unsafe {
            let slot = self.memory.as_mut_ptr().add(start);
            (AtomicU64::from_ptr(slot.cast()), AtomicU64::from_ptr(slot.add(8).cast()), slot.add(16))
        }
    }
}

/// A new board, and where the others find it while the file is open.
fn create(members: usize) -> Result<(File, Place), String> {
    let create = || -> std::io::Result<(File, Place)> {
        let file = rustix::fs::memfd_create("burn-megatron", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let file = File::from(file);
        file.set_len(bytes(members) as u64)?;
        // Reads of a file that has been cut would end the process.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let mut token = [0; TOKEN];
        getrandom::fill(&mut token).map_err(std::io::Error::other)?;
        std::os::unix::fs::FileExt::write_all_at(&file, &token, 0)?;
        let place = Place { process: std::process::id(), file: file.as_raw_fd(), token };
        Ok((file, place))
    };
    create().map_err(|error| format!("no memory to share: {error}"))
}

fn map(file: &File, members: usize) -> Result<MmapRaw, String> {
    let mapped = MmapOptions::new().len(bytes(members)).map_raw(file);
    mapped.map_err(|error| format!("the shared memory cannot be mapped: {error}"))
}

/// A page with the identity, and two slots for each member.
fn bytes(members: usize) -> usize {
    SLOT * (1 + 2 * members)
}

#[cfg(test)]
mod tests;
