//! All device communicators of a world, and the watchdog thread.
//!
//! A collective on a GPU cannot be cancelled: its kernel spins until every peer has arrived. When the run has failed,
//! the watchdog aborts every communicator, so that kernels end, reads of devices return, and ranks see the failure at
//! their next operation.

use super::{GroupId, World};
use crate::comm::failure::RunError;
use crate::comm::local_all_gather::LocalAllGather;
use parking_lot::{Mutex, MutexGuard};
use std::any::Any;
use std::collections::HashMap;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// The watchdog's polling interval.
const PERIOD: Duration = Duration::from_millis(100);

/// How long ranks have to stop after a failure before the process exits, at most.
const GRACE: Duration = Duration::from_secs(30);

/// How long the end of a run waits for NCCL, which frees what a failed run has left only then.
const FAREWELL: Duration = Duration::from_secs(30);

/// A member's end of a group's communicator on a device, as its world knows it.
pub(crate) trait DeviceLink: Any + Send + Sync {
    /// Reports an error of the communicator, and an operation that takes too long.
    fn check(&self);

    /// Ends the communicator without its peers.
    fn abort(&self);

    /// Ends the communicator with its peers.
    fn destroy(&self);

    /// Whether it has not ended.
    fn is_live(&self) -> bool;

    /// Whether its end is over.
    fn is_gone(&self) -> bool;
}

type Map = HashMap<(GroupId, usize), Option<Arc<dyn DeviceLink>>>;

/// The communicator of each group and member, or `None` if the host transfers the data.
#[derive(Default)]
pub(crate) struct DeviceLinks {
    map: Mutex<Map>,
    /// Per group.
    boards: Mutex<HashMap<GroupId, Arc<dyn Any + Send + Sync>>>,
    are_gpus_shared: AtomicBool,
    /// Data goes through NCCL's kernels alone.
    are_copy_engines_off: AtomicBool,
    is_watched: AtomicBool,
    is_closed: AtomicBool,
}

impl DeviceLinks {
    /// This member's communicator, if it has been decided yet.
    pub(crate) fn get(&self, key: (GroupId, usize)) -> Option<Option<Arc<dyn DeviceLink>>> {
        self.lock().get(&key).cloned()
    }

    /// Ranks of this process share GPUs; called before any rank starts.
    pub(crate) fn share_gpus(&self) {
        self.are_gpus_shared.store(true, Ordering::Release);
    }

    /// Whether they do.
    pub(crate) fn are_gpus_shared(&self) -> bool {
        self.are_gpus_shared.load(Ordering::Acquire)
    }

    /// Whether DMA copy engines transfer activations and tokens where they can.
    pub(crate) fn use_copy_engines(&self, on: bool) {
        self.are_copy_engines_off.store(!on, Ordering::Release);
    }

    /// Whether they do.
    pub(crate) fn are_copy_engines_on(&self) -> bool {
        !self.are_copy_engines_off.load(Ordering::Acquire)
    }

    /// The board of a group with this many members.
    pub(crate) fn board<T: Clone + Send + Sync + 'static>(
        &self,
        group: GroupId,
        members: usize,
    ) -> Arc<LocalAllGather<T>> {
        let mut boards = self.boards.lock();
        let board = boards.entry(group).or_insert_with(|| Arc::new(LocalAllGather::<T>::new(members))).clone();
        board.downcast().expect("the members of a group tell each other values of one type")
    }

    /// Stores `link` for `key` and starts the watchdog with the first link.
    pub(crate) fn insert(&self, world: &Arc<World>, key: (GroupId, usize), link: Option<Arc<dyn DeviceLink>>) {
        let is_first = link.is_some() && !self.is_watched.swap(true, Ordering::AcqRel);
        self.lock().insert(key, link);
        if is_first {
            let world = Arc::downgrade(world);
            let watchdog = std::thread::Builder::new().name("NCCL watchdog".into());
            watchdog.spawn(move || watch(&world)).expect("the system can start one more thread");
        }
    }

    /// Ends all communicators, after the last rank has stopped. With `has_failed`, peers may never arrive. Waits for
    /// NCCL for a while; whatever is left then stays until the process exits.
    pub(crate) fn close(&self, has_failed: bool) {
        self.is_closed.store(true, Ordering::Release);
        let links = self.made();
        // In a thread each, because members of one communicator wait for each other.
        for link in links.clone() {
            std::thread::spawn(move || match has_failed {
                true => link.abort(),
                false => link.destroy(),
            });
        }
        // Also waits for those that the watchdog is ending: a process that exits during NCCL's calls may crash.
        let start = Instant::now();
        while start.elapsed() < FAREWELL && !links.iter().all(|link| link.is_gone()) {
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Whether there are communicators.
    pub(crate) fn is_watched(&self) -> bool {
        self.is_watched.load(Ordering::Acquire)
    }

    /// Whether the last rank has stopped.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    fn made(&self) -> Vec<Arc<dyn DeviceLink>> {
        self.lock().values().flatten().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, Map> {
        self.map.lock()
    }
}

/// Checks the communicators of a world until its run has ended.
fn watch(world: &Weak<World>) {
    loop {
        std::thread::sleep(PERIOD);
        let Some(world) = world.upgrade() else { return };
        if world.links.is_closed.load(Ordering::Acquire) {
            return;
        }
        if let Some(failure) = world.failure() {
            return end(&world, &failure);
        }
        for link in world.links.made() {
            link.check();
        }
    }
}

/// Ends all communicators of a failed run, and the process if its ranks do not stop.
fn end(world: &World, failure: &RunError) {
    let start = Instant::now();
    while start.elapsed() < GRACE && !world.is_too_late(start) {
        // All at once: ranks stop only when the kernels of all communicators have ended, and until then none is freed. And
        // repeatedly: a rank may have been about to join one more.
        for link in world.links.made() {
            if link.is_live() {
                std::thread::spawn(move || link.abort());
            }
        }
        std::thread::sleep(PERIOD);
        if world.links.is_closed.load(Ordering::Acquire) {
            return;
        }
    }
    let seconds = start.elapsed().as_secs();
    let _ = writeln!(
        io::stderr(),
        "{failure}\nThe ranks of this process did not stop within {seconds} s: it ends without them."
    );
    unsafe extern "C" {
        fn _exit(status: i32) -> !;
    }
    // SAFETY: nothing in this process is waited for, because handlers of `exit` would wait for the GPUs.
    unsafe { _exit(1) }
}
