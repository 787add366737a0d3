//! Memory that the members of a group in several processes of one host share.
//!
//! The first member creates an unnamed file in memory (memfd), which the others open through `/proc`: the system lets
//! processes of the same user do so, and nobody has to delete anything, however the run ends.

use super::{Group, agree};
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;

/// Bytes of the identity, and of the page that begins with it.
pub(super) const TOKEN: usize = 32;
const PAGE: usize = 4096;

/// Where the memory is found, and its identity: another container may have another process of this number.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Place {
    pub(super) process: u32,
    pub(super) file: i32,
    pub(super) token: [u8; TOKEN],
}

/// One member's mapping.
pub(crate) struct SharedMemory(MmapRaw);

impl SharedMemory {
    /// `bytes` bytes, zeros at first, for all members of `group`, all of whom call this.
    ///
    /// # Errors
    /// The same for all of them: why the first of them cannot take part.
    pub(crate) fn meet(group: &Group, bytes: usize) -> Result<Self, String> {
        let created = (group.rank() == 0).then(|| create(bytes));
        let place =
            created.as_ref().map(|created| created.as_ref().map(|(_, place)| place.clone()).map_err(String::clone));
        let place: Result<Place, String> = group.broadcast_host(place, 0);
        let opened = place.and_then(|place| Self::open(&place, bytes));
        // The file stays until all have opened it.
        agree(group, opened)
    }

    pub(crate) fn open(place: &Place, bytes: usize) -> Result<Self, String> {
        let path = format!("/proc/{}/fd/{}", place.process, place.file);
        let file = OpenOptions::new().read(true).write(true).open(path);
        let file =
            file.map_err(|error| format!("the memory of process {} cannot be opened: {error}", place.process))?;
        let other = || format!("process {} is another one here, as in another container", place.process);
        if file.metadata().map_or(0, |about| about.len()) != (PAGE + bytes) as u64 {
            return Err(other());
        }
        let mapped = MmapOptions::new().len(PAGE + bytes).map_raw(&file);
        let memory = mapped.map_err(|error| format!("the shared memory cannot be mapped: {error}"))?;
        // SAFETY: the file is longer, and its first bytes were written before its place was told.
        let token = unsafe { std::slice::from_raw_parts(memory.as_ptr(), TOKEN) };
        if token == place.token { Ok(Self(memory)) } else { Err(other()) }
    }

    /// The first byte, at the start of a page; valid as long as `self`.
    pub(crate) fn start(&self) -> *mut u8 {
        // The identity comes before it.
        self.0.as_mut_ptr().wrapping_add(PAGE)
    }
}

/// New memory, and where the others find it while the file is open.
pub(crate) fn create(bytes: usize) -> Result<(File, Place), String> {
    let create = || -> std::io::Result<(File, Place)> {
        let file = rustix::fs::memfd_create("burn-megatron", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let file = File::from(file);
        file.set_len((PAGE + bytes) as u64)?;
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
