//! How the ranks of a run communicate on the host: in shared memory within a process, through process 0 between
//! processes.
//!
//! One mutex guards all groups. Under the lock data is only moved as a pointer: the arithmetic of a collective runs
//! unlocked, in the thread of the last rank of the process to call it. In a run of one process one lock sees every
//! rank, so a deadlock is known the moment it happens.

mod coordinate;
#[cfg(any(feature = "cuda", test))]
mod device;
#[cfg(feature = "cuda")]
mod device_links;
mod ending;
mod failing;
mod host_collective;
mod p2p;
mod processes;
#[cfg(test)]
mod tests;

#[cfg(feature = "cuda")]
pub(crate) use device_links::DeviceLink;
#[cfg(feature = "cuda")]
use device_links::DeviceLinks;

use super::codec::Codec;
use super::failure::{OpRecord, RunError};
use super::remote::{Blob, Contribution, Member, OpKey, Remote};
use ending::Ending;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

type Shared = Arc<dyn Any + Send + Sync>;

/// How long a rank waits for its peers before the run is declared dead, unless the run says otherwise. A rank that computes
/// for longer between two collectives than this is indistinguishable from one that hangs.
const PATIENCE: Duration = Duration::from_secs(600);

/// All ranks and what they communicate, as one process sees it.
pub(crate) struct World {
    coords: Vec<String>,
    state: Mutex<State>,
    /// Of ranks that wait: something has changed.
    changed: Condvar,
    /// Of threads that wait for the run to fail or to finish.
    over: Condvar,
    /// The other processes, if there are any.
    remote: Option<Remote>,
    /// How long a rank waits for its peers, in milliseconds.
    patience: AtomicU64,
    /// The device communicators of its groups.
    #[cfg(feature = "cuda")]
    pub(crate) links: DeviceLinks,
}

struct State {
    /// Of the other processes' ranks, process 0 knows which collectives they call, and others nothing.
    ranks: Vec<RankState>,
    groups: Vec<GroupState>,
    /// Its groups are those of `groups`, in this order.
    #[cfg(any(feature = "cuda", test))]
    recorder: super::recorder::FlightRecorder,
    /// Inputs from other processes, for collectives whose members here wait for them.
    gathered: HashMap<OpKey, Vec<(Member, Blob)>>,
    /// What ranks of other processes have sent, by group, sender and receiver.
    remote_messages: HashMap<(String, usize, usize), VecDeque<(OpRecord, Blob)>>,
    failure: Option<RunError>,
    ending: Ending,
}

#[derive(Default)]
struct RankState {
    activity: Activity,
    last: Option<OpRecord>,
    /// For peers, since the start.
    waited: Duration,
    #[cfg(any(feature = "cuda", test))]
    issued: Option<device::Issued>,
}

#[derive(Clone, Copy, Default, PartialEq)]
enum Activity {
    #[default]
    Running,
    /// For ranks of this process.
    Waiting,
    /// For another process.
    WaitingElsewhere,
    Finished,
}

struct GroupState {
    /// Name and members, for example `tp[0, 1]`.
    label: String,
    ranks: Vec<usize>,
    /// The processes that host its members; none are named if it is this one alone.
    processes: Vec<usize>,
    /// How many members this process hosts.
    here: usize,
    /// Per member: how many collectives it has called.
    called: Vec<u64>,
    /// Per member: bytes of the tensors that it has given to them.
    given: Vec<u64>,
    pending: HashMap<u64, PendingCollective>,
    messages: HashMap<(usize, usize), VecDeque<(OpRecord, Shared)>>,
    message_count: Vec<u64>,
    /// What members in other processes of this host issue on their GPUs, if its members are in several.
    #[cfg(any(feature = "cuda", test))]
    shared: Option<super::recorder::SharedRecorder>,
    /// What process 0 has yet to hear of members here, if there are others that share no memory with them.
    #[cfg(any(feature = "cuda", test))]
    unreported: device::Unreported,
}

struct PendingCollective {
    /// The first member to call it and its operation: what all others are compared with.
    first: (usize, OpRecord),
    inputs: Vec<Option<Shared>>,
    /// The same for the other processes, if there are any.
    contributions: Vec<(Contribution, Blob)>,
    arrived: usize,
    output: Option<Shared>,
    left: usize,
}

/// A group of its world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GroupId {
    index: usize,
    /// Whether members live in other processes.
    across: bool,
}

impl World {
    /// A world of `coords.len()` ranks in this process; `coords[r]` says where rank `r` sits in the mesh, for error
    /// messages.
    pub(crate) fn new(coords: Vec<String>) -> Arc<Self> {
        Self::over(coords, None)
    }

    /// A world whose other ranks live in other processes.
    pub(crate) fn over(coords: Vec<String>, remote: Option<Remote>) -> Arc<Self> {
        let state = State {
            ranks: coords.iter().map(|_| RankState::default()).collect(),
            groups: Vec::new(),
            #[cfg(any(feature = "cuda", test))]
            recorder: super::recorder::FlightRecorder::default(),
            gathered: HashMap::new(),
            remote_messages: HashMap::new(),
            failure: None,
            ending: Ending::default(),
        };
        Arc::new(Self {
            coords,
            state: Mutex::new(state),
            changed: Condvar::new(),
            over: Condvar::new(),
            remote,
            patience: AtomicU64::new(PATIENCE.as_millis() as u64),
            #[cfg(feature = "cuda")]
            links: DeviceLinks::default(),
        })
    }

    /// How long a rank waits for its peers.
    pub(crate) fn patience(&self) -> Duration {
        Duration::from_millis(self.patience.load(Ordering::Relaxed))
    }

    /// Sets it, before the ranks start.
    pub(crate) fn set_patience(&self, patience: Duration) {
        self.patience.store(patience.as_millis().try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// The process that hosts a rank.
    pub(crate) fn process_of(&self, rank: usize) -> usize {
        self.remote.as_ref().map_or(0, |remote| remote.process_of(rank))
    }

    /// The name of a rank's host; `None` in a world of one process.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn host_of(&self, rank: usize) -> Option<&str> {
        self.remote.as_ref().map(|remote| remote.hosts[remote.process_of(rank)].as_str())
    }

    /// Processes of this host, as the launcher says.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn processes_on_host(&self) -> usize {
        self.remote.as_ref().map_or(1, |remote| remote.on_host)
    }

    /// Counts bytes that a member gives to a collective of the group.
    pub(crate) fn count_given(&self, group: GroupId, member: usize, bytes: usize) {
        self.lock().groups[group.index].given[member] += bytes as u64;
    }

    /// The bytes that a member has given to collectives of the group.
    pub(crate) fn given_bytes(&self, group: GroupId, member: usize) -> u64 {
        self.lock().groups[group.index].given[member]
    }

    /// Whether this process hosts a rank.
    pub(crate) fn is_here(&self, rank: usize) -> bool {
        self.remote.as_ref().is_none_or(|remote| remote.process_of(rank) == remote.process)
    }

    /// The group of these ranks under this name, created on first use.
    pub(crate) fn group(&self, name: &str, ranks: &[usize]) -> GroupId {
        let label = format!("{name}{ranks:?}");
        let here = ranks.iter().filter(|&&rank| self.is_here(rank)).count();
        let across = here < ranks.len();
        let mut state = self.lock();
        if let Some(index) = state.groups.iter().position(|g| g.label == label) {
            return GroupId { index, across };
        }
        #[cfg(any(feature = "cuda", test))]
        state.recorder.add_group(ranks.iter().map(|&rank| self.is_here(rank)));
        let mut processes: Vec<usize> = ranks.iter().filter(|_| across).map(|&rank| self.process_of(rank)).collect();
        processes.sort_unstable();
        processes.dedup();
        state.groups.push(GroupState {
            label,
            ranks: ranks.to_vec(),
            processes,
            here,
            called: vec![0; ranks.len()],
            given: vec![0; ranks.len()],
            pending: HashMap::new(),
            messages: HashMap::new(),
            message_count: vec![0; ranks.len()],
            #[cfg(any(feature = "cuda", test))]
            shared: None,
            #[cfg(any(feature = "cuda", test))]
            unreported: device::Unreported::default(),
        });
        GroupId { index: state.groups.len() - 1, across }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A rank can only panic under the lock by a bug here; its peers must still be able to stop.
        self.state.lock()
    }
}

/// The value inside, without a copy: no other thread holds an input once the collective is complete.
fn unwrap_shared<T: Send + Sync + 'static>(shared: Shared) -> T {
    let typed = shared.downcast::<T>().expect("equal records mean equal types");
    Arc::into_inner(typed).expect("a deposited value has one owner")
}
