//! All communicators of a world, and the thread that watches over them.
//!
//! A collective on a GPU cannot be taken back: its kernel spins until every peer has come. When the run has failed, the
//! watchdog aborts every communicator, so that kernels end, reads of devices return, and ranks meet the failure at
//! their next operation.

use super::communicator::Communicator;
use super::copies::Loan;
use crate::comm::board::Board;
use crate::comm::{GroupId, RunError, World};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How often the watchdog looks.
const PERIOD: Duration = Duration::from_millis(100);

/// How long ranks have to stop after a failure before the process ends without them.
const GRACE: Duration = Duration::from_secs(30);

/// How long the end of a run waits for NCCL to let go.
const FAREWELL: Duration = Duration::from_secs(10);

type Map = HashMap<(GroupId, usize), Option<Arc<Communicator>>>;

/// Per group and member: the communicator, or `None` where the host carries the data.
#[derive(Default)]
pub(crate) struct Links {
    map: Mutex<Map>,
    /// Per group.
    boards: Mutex<HashMap<GroupId, Arc<Board<Loan>>>>,
    are_gpus_shared: AtomicBool,
    is_watched: AtomicBool,
    is_closed: AtomicBool,
}

impl Links {
    /// What was found out about this member's communicator, if anything yet.
    pub(crate) fn get(&self, key: (GroupId, usize)) -> Option<Option<Arc<Communicator>>> {
        self.lock().get(&key).cloned()
    }

    /// Ranks of this process share GPUs; said before any rank starts.
    pub(crate) fn share_gpus(&self) {
        self.are_gpus_shared.store(true, Ordering::Release);
    }

    /// Whether they do.
    pub(crate) fn are_gpus_shared(&self) -> bool {
        self.are_gpus_shared.load(Ordering::Acquire)
    }

    /// The board of a group of so many members.
    pub(crate) fn board(&self, group: GroupId, members: usize) -> Arc<Board<Loan>> {
        let mut boards = self.boards.lock().unwrap_or_else(PoisonError::into_inner);
        boards.entry(group).or_insert_with(|| Arc::new(Board::new(members))).clone()
    }

    /// Keeps `link` for `key` and has it watched over from now on.
    pub(crate) fn insert(&self, world: &Arc<World>, key: (GroupId, usize), link: Option<Arc<Communicator>>) {
        let is_first = link.is_some() && !self.is_watched.swap(true, Ordering::AcqRel);
        self.lock().insert(key, link);
        if is_first {
            let world = Arc::downgrade(world);
            let watchdog = std::thread::Builder::new().name("NCCL watchdog".into());
            watchdog.spawn(move || watch(&world)).expect("the system can start one more thread");
        }
    }

    /// Ends all communicators, after the last rank has stopped; `has_failed` says that peers may never come. Waits for
    /// a while for NCCL to let go; what it does not let go of by then stays until the process ends.
    pub(crate) fn close(&self, has_failed: bool) {
        self.is_closed.store(true, Ordering::Release);
        let links = self.made();
        // A thread each: members of one communicator wait for each other.
        for link in links.clone() {
            std::thread::spawn(move || match has_failed {
                true => link.abort(),
                false => link.destroy(),
            });
        }
        // Those that the watchdog has begun to end are waited for too: a process that exits under NCCL's calls may
        // crash.
        let start = Instant::now();
        while start.elapsed() < FAREWELL && !links.iter().all(|link| link.is_gone()) {
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn made(&self) -> Vec<Arc<Communicator>> {
        self.lock().values().flatten().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, Map> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Looks after the communicators of a world until its run has ended.
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

/// Ends all communicators of a failed run, and the process if that does not free its ranks.
fn end(world: &World, failure: &RunError) {
    let start = Instant::now();
    while start.elapsed() < GRACE {
        // All at once: an abort frees memory of its device, which waits for the kernels of the device's other
        // communicators. And again and again: a rank may have been about to join one more.
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
    eprintln!("{failure}\nThe ranks of this process did not stop within {} s: it ends without them.", GRACE.as_secs());
    unsafe extern "C" {
        fn _exit(status: i32) -> !;
    }
    // SAFETY: nothing of this process is waited for, which is the point: handlers of `exit` would wait for the GPUs.
    unsafe { _exit(1) }
}
