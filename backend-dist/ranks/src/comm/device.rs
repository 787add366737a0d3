//! What a group does on its members' GPUs.

use super::local_all_gather::LocalAllGather;
use super::world::{DeviceLink, GroupId, World};
use super::{DeviceOp, FailureCause, Group};
use std::any::Any;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long an error of NCCL waits for whoever knows its cause.
const BETTER_REASON: Duration = Duration::from_secs(2);

/// A member of a group as device threads and the watchdog know it. It does not keep the world alive: work that is
/// queued may outlive the run.
#[derive(Clone)]
pub(crate) struct Member {
    world: Weak<World>,
    group: GroupId,
    member: usize,
    rank: usize,
    text: String,
}

impl Member {
    /// Ends the run because of `message`, as a failure of this member's rank. Waits a little for a better reason: where
    /// a peer has died, NCCL says no more than that a connection is gone, and may say it first.
    pub(crate) fn fail(&self, message: &str) {
        let Some(world) = self.world.upgrade() else { return };
        let start = Instant::now();
        while start.elapsed() < BETTER_REASON && world.failure().is_none() {
            std::thread::sleep(Duration::from_millis(20));
        }
        if world.failure().is_none() {
            world.fail(self.rank, FailureCause::Error(format!("NCCL on {}: {message}", self.text)));
        }
    }

    /// Whether the run has failed or ended.
    pub(crate) fn has_failed(&self) -> bool {
        self.world.upgrade().is_none_or(|world| world.failure().is_some())
    }

    /// Whether the ranks of this process have stopped, or the run is over.
    pub(crate) fn has_stopped(&self) -> bool {
        self.world.upgrade().is_none_or(|world| world.links.is_closed())
    }

    /// This member's rank and `op`, operation `sequence` of the group, in words.
    pub(crate) fn words(&self, op: DeviceOp, sequence: u64) -> String {
        let record = self.world.upgrade().map(|world| world.device_record(self.group, self.member, sequence, op));
        let what = record.map_or_else(|| format!("operation {sequence} of {}", self.text), |record| record.to_string());
        format!("rank {} in {what}", self.rank)
    }

    /// Ends the run if `op`, operation `sequence` of the group, was issued too long ago and has not ended.
    pub(crate) fn time_out(&self, op: DeviceOp, sequence: u64, since: Instant) {
        if let Some(world) = self.world.upgrade().filter(|world| since.elapsed() > world.patience()) {
            let seconds = world.patience().as_secs();
            let waiting_in = Box::new(world.device_record(self.group, self.member, sequence, op));
            world.fail(self.rank, FailureCause::Timeout { waiting_in, seconds });
        }
    }
}

impl Group {
    /// This member, for threads that are no rank's.
    ///
    /// # Panics
    /// For a group of one, which has no device communicator.
    pub(crate) fn as_member(&self) -> Member {
        let (world, group) = self.world_and_id();
        let (rank, text) = (self.ranks[self.member], format!("{self:?}"));
        Member { world: Arc::downgrade(world), group: *group, member: self.member, rank, text }
    }

    /// Notes that this rank issues `op` on its GPU, and returns its sequence number on the group; never waits.
    pub(crate) fn issue(&self, op: DeviceOp) -> u64 {
        let (world, group) = self.world_and_id();
        world.issue(*group, self.member, op)
    }

    /// Stops this rank if the run has failed.
    pub(crate) fn stop_if_failed(&self) {
        self.world_and_id().0.stop_if_failed();
    }

    /// How long its members wait for each other.
    pub(crate) fn patience(&self) -> Duration {
        self.world_and_id().0.patience()
    }

    fn world_and_id(&self) -> &(Arc<World>, GroupId) {
        self.world.as_ref().unwrap_or_else(|| panic!("{self:?} has only one member"))
    }

    /// This rank's end of the group's device communicator, made by `join` on first use; `None` where the host carries
    /// the data.
    pub(crate) fn device_link<L: DeviceLink>(&self, join: impl FnOnce(&Self) -> Option<Arc<L>>) -> Option<Arc<L>> {
        let (world, id) = self.world.as_ref()?;
        let key = (*id, self.member);
        if let Some(link) = world.links.get(key) {
            return link.map(transport);
        }
        let link = join(self);
        world.links.insert(world, key, link.clone().map(|link| link as _));
        link
    }

    /// The device communicator of [`device_link`](Self::device_link), if it was made.
    pub(crate) fn existing_link<L: DeviceLink>(&self) -> Option<Arc<L>> {
        let (world, id) = self.world.as_ref()?;
        world.links.get((*id, self.member)).flatten().map(transport)
    }

    /// Whether [`device_link`](Self::device_link) has made a communicator, or found that there is none.
    pub fn knows_link(&self) -> bool {
        self.world.as_ref().is_some_and(|(world, id)| world.links.get((*id, self.member)).is_some())
    }

    /// Whether ranks of this process share GPUs.
    pub(crate) fn shares_gpus(&self) -> bool {
        self.world_and_id().0.links.are_gpus_shared()
    }

    /// Whether DMA copy engines transfer this run's activations and tokens where they can.
    pub(crate) fn uses_copy_engines(&self) -> bool {
        self.world_and_id().0.links.are_copy_engines_on()
    }

    /// The all-gather by which the members in this process tell each other about buffers on their GPUs.
    pub(crate) fn local_all_gather<T: Clone + Send + Sync + 'static>(&self) -> Arc<LocalAllGather<T>> {
        let (world, id) = self.world_and_id();
        world.links.board(*id, self.size())
    }

    /// The group of the two members `from` and `to`, in this order; one of them must be this rank.
    pub(crate) fn pair(&self, from: usize, to: usize) -> Self {
        let (world, _) = self.world_and_id();
        let ranks = [self.ranks[from], self.ranks[to]];
        Self::new(world, &format!("{}/{from}>{to}", self.name), &ranks, self.ranks[self.member])
    }
}

/// The link of the run's only transport.
fn transport<L: DeviceLink>(link: Arc<dyn DeviceLink>) -> Arc<L> {
    let link: Arc<dyn Any + Send + Sync> = link;
    link.downcast().expect("a run has one transport between its devices")
}
