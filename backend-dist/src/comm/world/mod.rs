//! Where ranks meet: in shared memory within a process, through process 0 between processes.
//!
//! One mutex guards all groups. A meeting holds no data under the lock for longer than a pointer move: the arithmetic
//! runs unlocked, in the thread of the last rank of the process to arrive. In a world of one process one lock sees
//! every rank, so a deadlock is known the moment it happens.

mod across;
#[cfg(any(feature = "cuda", test))]
mod device;
mod failing;
mod mail;
mod meeting;

use super::codec::Codec;
use super::failure::{OpRecord, RunError};
use super::remote::{Blob, MeetingKey, Part, Remote};
use failing::Ending;
use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

type Shared = Arc<dyn Any + Send + Sync>;

/// How long a rank waits for its peers before the run is declared dead. A rank that computes for longer between two
/// collectives than this is indistinguishable from one that hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(600);

/// All ranks and everything they exchange, as one process sees it.
pub(crate) struct World {
    places: Vec<String>,
    state: Mutex<State>,
    changed: Condvar,
    /// The other processes, if there are any.
    remote: Option<Remote>,
    /// For threads that outlive a call.
    me: Weak<Self>,
    /// The device communicators of its groups.
    #[cfg(feature = "cuda")]
    pub(crate) links: crate::nccl::Links,
}

struct State {
    /// Of the other processes' ranks, process 0 knows what they bring to meetings, and others nothing.
    ranks: Vec<RankState>,
    groups: Vec<GroupState>,
    /// Its groups are those of `groups`, in this order.
    #[cfg(any(feature = "cuda", test))]
    recorder: super::recorder::FlightRecorder,
    /// What other processes have brought to meetings whose members here wait for it.
    met: HashMap<MeetingKey, Vec<(usize, Blob)>>,
    /// What ranks of other processes have sent, by group, sender and receiver.
    post: HashMap<(String, usize, usize), VecDeque<(OpRecord, Blob)>>,
    failure: Option<RunError>,
    ending: Ending,
}

#[derive(Default)]
struct RankState {
    activity: Activity,
    last: Option<OpRecord>,
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
    /// Per member: how many meetings it has entered.
    entered: Vec<u64>,
    meetings: HashMap<u64, Meeting>,
    mail: HashMap<(usize, usize), VecDeque<(OpRecord, Shared)>>,
    mail_count: Vec<u64>,
}

struct Meeting {
    /// The first to arrive and what it issued: what all others are compared with.
    first: (usize, OpRecord),
    inputs: Vec<Option<Shared>>,
    /// The same for the other processes, if there are any.
    parts: Vec<(Part, Blob)>,
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
    /// A world of `places.len()` ranks in this process; `places[r]` says where rank `r` sits in the mesh, for error
    /// messages.
    pub(crate) fn new(places: Vec<String>) -> Arc<Self> {
        Self::over(places, None)
    }

    /// A world whose other ranks live in other processes.
    pub(crate) fn over(places: Vec<String>, remote: Option<Remote>) -> Arc<Self> {
        let state = State {
            ranks: places.iter().map(|_| RankState::default()).collect(),
            groups: Vec::new(),
            #[cfg(any(feature = "cuda", test))]
            recorder: super::recorder::FlightRecorder::default(),
            met: HashMap::new(),
            post: HashMap::new(),
            failure: None,
            ending: Ending::default(),
        };
        Arc::new_cyclic(|me| Self {
            places,
            state: Mutex::new(state),
            changed: Condvar::new(),
            remote,
            me: me.clone(),
            #[cfg(feature = "cuda")]
            links: crate::nccl::Links::default(),
        })
    }

    /// The process that hosts a rank.
    pub(crate) fn process_of(&self, rank: usize) -> usize {
        self.remote.as_ref().map_or(0, |remote| remote.process_of(rank))
    }

    /// Whether this process hosts a rank.
    fn is_here(&self, rank: usize) -> bool {
        self.remote.as_ref().is_none_or(|remote| remote.process_of(rank) == remote.process)
    }

    /// The group of these ranks under this name, made on first use.
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
            entered: vec![0; ranks.len()],
            meetings: HashMap::new(),
            mail: HashMap::new(),
            mail_count: vec![0; ranks.len()],
        });
        GroupId { index: state.groups.len() - 1, across }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A rank can only panic under the lock by a bug here; its peers must still be able to stop.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The value inside, without a copy: nobody else holds a deposited input once the meeting is complete.
fn unwrap_shared<T: Send + Sync + 'static>(shared: Shared) -> T {
    let typed = shared.downcast::<T>().expect("equal records mean equal types");
    Arc::into_inner(typed).expect("a deposited value has one owner")
}

/// What another process has sent, as a value of the type that the records say.
fn decoded<T>(codec: Codec<T>, bytes: &[u8]) -> T {
    (codec.decode)(bytes).unwrap_or_else(|what| panic!("another process has sent what cannot be read: {what}"))
}
