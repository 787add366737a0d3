//! Rendezvous of the members of a group.

use super::library::{finished, free_raised, raise, text};
use crate::comm::Group;
use crate::comm::abort::{self, Abort};
use cudarc::driver::result as driver;
use cudarc::nccl::{result as nccl, sys};
use std::ffi::c_char;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// The id of a new communicator, after a check that all members have the same version of NCCL; a collective.
///
/// # Errors
/// Without NCCL or with different versions of it.
pub(crate) fn agree(group: &Group) -> Result<sys::ncclUniqueId, String> {
    let version = gpu::nccl_version().map_err(|error| error.to_string())?.to_string();
    let versions = group.all_gather_host(version.clone());
    if let Some(other) = versions.iter().position(|other| *other != version) {
        let (peer, theirs) = (group.ranks()[other], &versions[other]);
        return Err(format!("version {version} here, {theirs} on rank {peer}: install the same one everywhere"));
    }
    let id = (group.rank() == 0).then(nccl::get_uniqueid).transpose().map_err(text)?;
    let id = group.broadcast_host(id.map(|id| id.internal.map(|byte| byte as u8).to_vec()), 0);
    let id: [u8; 128] = id.try_into().map_err(|_| "the id of a communicator has 128 bytes".to_string())?;
    Ok(sys::ncclUniqueId { internal: id.map(|byte| byte as _) })
}

/// Creates the communicator with the other members. NCCL waits for them without a limit, so this runs in a separate
/// thread, and the calling thread can stop when the run has failed.
pub(crate) fn meet(group: &Group, context: usize, id: sys::ncclUniqueId, blocks: Option<i32>) -> Result<usize, String> {
    let (size, rank) = (group.size() as i32, group.rank() as i32);
    let (sender, outcome) = mpsc::channel();
    let join = move || {
        let mut comm = std::ptr::null_mut();
        // SAFETY: the context lives as long as the process; `comm` is written before it is read; NCCL reads a
        // configuration up to its size.
        let result = unsafe {
            driver::ctx::set_current(context as _).map_err(|error| error.to_string()).and_then(|()| match blocks {
                None => finished(nccl::comm_init_rank(&mut comm, size, id, rank)),
                Some(blocks) => {
                    let mut config = Config::of_blocks(blocks);
                    finished(nccl::comm_init_rank_config(&mut comm, size, id, rank, (&raw mut config).cast()))
                }
            })
        };
        let made = result.is_ok();
        if sender.send(result.map(|()| comm as usize)).is_err() && made {
            abort::abort(&Unclaimed(comm as usize), "a communicator that came too late", abort::LIMIT);
        }
    };
    std::thread::Builder::new()
        .name(format!("join {}", group.name()))
        .spawn(join)
        .map_err(|error| format!("no thread to join in: {error}"))?;
    let start = Instant::now();
    loop {
        match outcome.recv_timeout(Duration::from_millis(50)) {
            Ok(comm) => return comm,
            Err(mpsc::RecvTimeoutError::Disconnected) => return Err("NCCL has panicked; its message is above".into()),
            Err(mpsc::RecvTimeoutError::Timeout) => group.stop_if_failed(),
        }
        if start.elapsed() > group.patience() {
            let seconds = group.patience().as_secs();
            return Err(format!("the members have not found each other in {seconds} s: see NCCL_DEBUG=INFO"));
        }
    }
}

/// A communicator whose rank has stopped before it was there.
struct Unclaimed(usize);

impl Abort for Unclaimed {
    fn raise(&self) -> Result<(), String> {
        // SAFETY: no other reference to this communicator exists.
        unsafe { raise(self.0) }
    }

    fn inside(&self) -> Option<String> {
        None
    }

    fn is_in_use(&self) -> bool {
        false
    }

    fn free(&self) -> Result<(), String> {
        free_raised()
    }
}

/// `ncclConfig_t` as in NCCL 2.18: later fields keep their defaults, because of `version` and `size`.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: i32,
    cga_cluster_size: i32,
    min_ctas: i32,
    max_ctas: i32,
    net_name: *const c_char,
    split_share: i32,
}

impl Config {
    /// `NCCL_CONFIG_INITIALIZER` (nccl.h) with at most this many thread blocks.
    fn of_blocks(blocks: i32) -> Self {
        let unset = i32::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 21800,
            blocking: unset,
            cga_cluster_size: unset,
            min_ctas: unset,
            max_ctas: blocks,
            net_name: std::ptr::null(),
            split_share: unset,
        }
    }
}
