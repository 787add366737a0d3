//! The in-process transport: ranks are threads of one process and meet in shared memory.
//!
//! One mutex guards all groups. A meeting holds no data under the lock for longer than a pointer move: the arithmetic
//! runs unlocked, in the thread of the last rank to arrive. Because one lock sees every rank, a deadlock is known the
//! moment it happens.

#[cfg(any(feature = "cuda", test))]
mod device;

use super::failure::{Aborted, FailureCause, OpRecord, RunError};
use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::panic::resume_unwind;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

type Shared = Arc<dyn Any + Send + Sync>;

/// How long a rank waits for its peers before the run is declared dead. A rank that computes for longer between two
/// collectives than this is indistinguishable from one that hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(600);

/// All ranks of a process and everything they exchange.
pub(crate) struct World {
    places: Vec<String>,
    state: Mutex<State>,
    changed: Condvar,
    /// The device communicators of its groups.
    #[cfg(feature = "cuda")]
    pub(crate) links: crate::nccl::Links,
}

struct State {
    ranks: Vec<RankState>,
    groups: Vec<GroupState>,
    /// Its groups are those of `groups`, in this order.
    #[cfg(any(feature = "cuda", test))]
    recorder: super::recorder::FlightRecorder,
    failure: Option<RunError>,
}

#[derive(Default)]
struct RankState {
    activity: Activity,
    last: Option<OpRecord>,
    #[cfg(any(feature = "cuda", test))]
    issued: Option<device::Issued>,
}

#[derive(Default, PartialEq)]
enum Activity {
    #[default]
    Running,
    Waiting,
    Finished,
}

struct GroupState {
    /// Name and members, for example `tp[0, 1]`.
    label: String,
    ranks: Vec<usize>,
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
    arrived: usize,
    output: Option<Shared>,
    left: usize,
}

/// Index of a group in its world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GroupId(usize);

impl World {
    /// A world of `places.len()` ranks; `places[r]` says where rank `r` sits in the mesh, for error messages.
    pub(crate) fn new(places: Vec<String>) -> Arc<Self> {
        let ranks = places.iter().map(|_| RankState::default()).collect();
        let state = State {
            ranks,
            groups: Vec::new(),
            #[cfg(any(feature = "cuda", test))]
            recorder: super::recorder::FlightRecorder::default(),
            failure: None,
        };
        Arc::new(Self {
            places,
            state: Mutex::new(state),
            changed: Condvar::new(),
            #[cfg(feature = "cuda")]
            links: crate::nccl::Links::default(),
        })
    }

    /// The group of these ranks under this name, made on first use.
    pub(crate) fn group(&self, name: &str, ranks: &[usize]) -> GroupId {
        let label = format!("{name}{ranks:?}");
        let mut state = self.lock();
        if let Some(index) = state.groups.iter().position(|g| g.label == label) {
            return GroupId(index);
        }
        #[cfg(any(feature = "cuda", test))]
        state.recorder.add_group(ranks.iter().map(|_| true));
        state.groups.push(GroupState {
            label,
            ranks: ranks.to_vec(),
            entered: vec![0; ranks.len()],
            meetings: HashMap::new(),
            mail: HashMap::new(),
            mail_count: vec![0; ranks.len()],
        });
        GroupId(state.groups.len() - 1)
    }

    /// All members bring `input`; the last to arrive runs `combine` on all inputs in group order; all get its result.
    pub(crate) fn meet<I, O>(
        &self,
        group: GroupId,
        member: usize,
        (name, payload): (String, String),
        input: I,
        combine: impl FnOnce(Vec<I>) -> O,
    ) -> Arc<O>
    where
        I: Send + Sync + 'static,
        O: Send + Sync + 'static,
    {
        let mut state = self.lock();
        self.leave_if_failed(&state);
        let (sequence, rank, size, record) = {
            let g = &mut state.groups[group.0];
            let sequence = g.entered[member];
            g.entered[member] += 1;
            let record = OpRecord { name, payload, group: g.label.clone(), sequence };
            (sequence, g.ranks[member], g.ranks.len(), record)
        };
        state.ranks[rank].last = Some(record.clone());
        let first = state.groups[group.0].meetings.get(&sequence).map(|meeting| meeting.first.clone());
        if let Some((peer, expected)) = first.filter(|(_, expected)| *expected != record) {
            self.stop(&mut state, rank, mismatch(record, peer, expected));
        }
        let meeting = state.groups[group.0].meetings.entry(sequence).or_insert_with(|| Meeting {
            first: (rank, record),
            inputs: (0..size).map(|_| None).collect(),
            arrived: 0,
            output: None,
            left: 0,
        });
        meeting.inputs[member] = Some(Arc::new(input));
        meeting.arrived += 1;
        if meeting.arrived == size {
            let inputs: Vec<Shared> = meeting.inputs.iter_mut().filter_map(Option::take).collect();
            drop(state);
            let inputs = inputs.into_iter().map(|input| unwrap_shared::<I>(input)).collect();
            let output: Shared = Arc::new(combine(inputs));
            state = self.lock();
            self.leave_if_failed(&state);
            let members = state.groups[group.0].ranks.clone();
            for peer in members {
                state.ranks[peer].activity = Activity::Running;
            }
            state.groups[group.0].meetings.get_mut(&sequence).expect("a meeting stays until all have left").output =
                Some(output);
            self.changed.notify_all();
        } else {
            state = self.wait(state, rank, |s| s.groups[group.0].meetings[&sequence].output.is_some());
        }
        let meetings = &mut state.groups[group.0].meetings;
        let meeting = meetings.get_mut(&sequence).expect("a meeting stays until all have left");
        let output = meeting.output.clone().expect("a complete meeting has its result");
        meeting.left += 1;
        if meeting.left == size {
            meetings.remove(&sequence);
        }
        drop(state);
        output.downcast().expect("equal records mean equal types")
    }

    /// Leaves `message` for member `to`; never waits.
    pub(crate) fn post<T: Send + Sync + 'static>(
        &self,
        group: GroupId,
        (from, to): (usize, usize),
        payload: String,
        message: T,
    ) {
        let mut state = self.lock();
        self.leave_if_failed(&state);
        let g = &mut state.groups[group.0];
        let record = OpRecord {
            name: format!("send to rank {}", g.ranks[to]),
            payload,
            group: g.label.clone(),
            sequence: g.mail_count[from],
        };
        g.mail_count[from] += 1;
        let (sender, receiver) = (g.ranks[from], g.ranks[to]);
        g.mail.entry((from, to)).or_default().push_back((record.clone(), Arc::new(message)));
        state.ranks[sender].last = Some(record);
        if state.ranks[receiver].activity == Activity::Waiting {
            // It looks at its mail when it wakes; until then it is not stuck.
            state.ranks[receiver].activity = Activity::Running;
        }
        self.changed.notify_all();
    }

    /// Takes the oldest message from member `from`; it must announce the same `payload`.
    pub(crate) fn take<T: Send + Sync + 'static>(
        &self,
        group: GroupId,
        (from, to): (usize, usize),
        payload: String,
    ) -> T {
        let mut state = self.lock();
        self.leave_if_failed(&state);
        let g = &state.groups[group.0];
        let (sender, receiver) = (g.ranks[from], g.ranks[to]);
        let issued = OpRecord {
            name: format!("receive from rank {sender}"),
            payload,
            group: g.label.clone(),
            sequence: g.mail_count[to],
        };
        state.ranks[receiver].last = Some(issued.clone());
        let key = (from, to);
        let has_mail = |s: &State| s.groups[group.0].mail.get(&key).is_some_and(|queue| !queue.is_empty());
        if !has_mail(&state) {
            state = self.wait(state, receiver, has_mail);
        }
        let (sent, message) = state.groups[group.0]
            .mail
            .get_mut(&key)
            .and_then(VecDeque::pop_front)
            .expect("waited until there was a message");
        if sent.payload != issued.payload {
            self.stop(&mut state, receiver, mismatch(issued, sender, sent));
        }
        drop(state);
        unwrap_shared(message)
    }

    /// Says that `rank` will not take part any more; peers that wait for it fail at once.
    pub(crate) fn finish(&self, rank: usize) {
        let mut state = self.lock();
        state.ranks[rank].activity = Activity::Finished;
        #[cfg(any(feature = "cuda", test))]
        if let Some(cause) = state.is_missed(rank) {
            self.fail_locked(&mut state, rank, cause);
        }
        self.detect_deadlock(&mut state, rank);
        self.changed.notify_all();
    }

    /// Records the failure of `rank` unless the run has already failed, and wakes everybody.
    pub(crate) fn fail(&self, rank: usize, cause: FailureCause) {
        self.fail_locked(&mut self.lock(), rank, cause);
    }

    /// The first failure, if any.
    pub(crate) fn failure(&self) -> Option<RunError> {
        self.lock().failure.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A rank can only panic under the lock by a bug here; its peers must still be able to stop.
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn leave_if_failed(&self, state: &State) {
        if state.failure.is_some() {
            // `resume_unwind` does not run the panic hook: the user sees the first failure, not its echoes.
            resume_unwind(Box::new(Aborted));
        }
    }

    fn stop(&self, state: &mut State, rank: usize, cause: FailureCause) -> ! {
        self.fail_locked(state, rank, cause);
        resume_unwind(Box::new(Aborted))
    }

    fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        rank: usize,
        ready: impl Fn(&State) -> bool,
    ) -> MutexGuard<'a, State> {
        let start = Instant::now();
        loop {
            self.leave_if_failed(&state);
            if ready(&state) {
                state.ranks[rank].activity = Activity::Running;
                return state;
            }
            state.ranks[rank].activity = Activity::Waiting;
            self.detect_deadlock(&mut state, rank);
            self.leave_if_failed(&state);
            let (next, timeout) = self
                .changed
                .wait_timeout(state, PATIENCE.saturating_sub(start.elapsed()))
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            state = next;
            if timeout.timed_out() && !ready(&state) {
                let waiting_in = Box::new(state.ranks[rank].last.clone().expect("a waiting rank has issued something"));
                self.stop(&mut state, rank, FailureCause::Timeout { waiting_in, seconds: PATIENCE.as_secs() });
            }
        }
    }

    fn detect_deadlock(&self, state: &mut State, rank: usize) {
        let stuck = state.ranks.iter().all(|r| r.activity != Activity::Running);
        let somebody_waits = state.ranks.iter().any(|r| r.activity == Activity::Waiting);
        if stuck && somebody_waits {
            self.fail_locked(state, rank, FailureCause::Deadlock);
        }
    }

    fn fail_locked(&self, state: &mut State, rank: usize, cause: FailureCause) {
        if state.failure.is_none() {
            let ranks = (0..state.ranks.len()).map(|r| self.describe(r, state)).collect();
            state.failure = Some(RunError { rank, place: self.places[rank].clone(), cause, ranks });
        }
        self.changed.notify_all();
    }

    fn describe(&self, rank: usize, state: &State) -> String {
        let place = &self.places[rank];
        let last = state.ranks[rank].last.as_ref().map(OpRecord::to_string);
        let doing = match (&state.ranks[rank].activity, last) {
            (Activity::Waiting, Some(op)) => format!("waiting in {op}"),
            (Activity::Finished, Some(op)) => format!("finished; its last operation was {op}"),
            (Activity::Finished, None) => "finished without any operation".to_string(),
            (Activity::Running, Some(op)) => format!("running; its last operation was {op}"),
            (Activity::Running, None) => "running; no operation yet".to_string(),
            (Activity::Waiting, None) => unreachable!("a waiting rank has issued something"),
        };
        #[cfg(any(feature = "cuda", test))]
        let doing = match state.last_on_device(rank) {
            Some(op) => format!("{doing}; on its GPU: {op}"),
            None => doing,
        };
        if place.is_empty() { format!("rank {rank}: {doing}") } else { format!("rank {rank} ({place}): {doing}") }
    }
}

fn mismatch(issued: OpRecord, peer: usize, expected: OpRecord) -> FailureCause {
    FailureCause::Mismatch { issued: Box::new(issued), peer, expected: Box::new(expected) }
}

/// The value inside, without a copy: nobody else holds a deposited input once the meeting is complete.
fn unwrap_shared<T: Send + Sync + 'static>(shared: Shared) -> T {
    let typed = shared.downcast::<T>().expect("equal records mean equal types");
    Arc::into_inner(typed).expect("a deposited value has one owner")
}
