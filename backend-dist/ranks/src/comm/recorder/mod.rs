//! The flight recorder of the GPUs: what every rank has asked of its GPU, and whether the members of a group agree.
//!
//! Nothing here waits. A rank learns that a peer has issued something else when it issues its own; text is made only
//! then.

mod reported;
mod shared;

pub(crate) use reported::{Report, ReportedOps};
pub(crate) use shared::SharedRecorder;

use super::{OpRecord, ReduceOp, describe};
use burn::tensor::DType;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Operations of a group that some members have issued and others have not; beyond this the oldest are forgotten.
const OPEN: usize = 4096;

/// Dimensions of a tensor that are recorded; the last one is the product of all that follow.
const DIMS: usize = 6;

/// What a rank asks of its GPU on a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DeviceOp {
    kind: DeviceOpKind,
    dtype: DType,
    rank: usize,
    shape: [usize; DIMS],
}

/// Which collective.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum DeviceOpKind {
    AllReduce(ReduceOp),
    /// The dimension along which shards are joined.
    AllGather(usize),
    /// The dimension along which the sum is divided.
    ReduceScatter(usize),
    /// The member that has the tensor.
    Broadcast(usize),
    /// The member that gets the sum.
    Reduce(usize),
    /// Rows for and from each member.
    AllToAll {
        send: Vec<usize>,
        receive: Vec<usize>,
    },
    /// From the first member of a pair to the second.
    Message,
}

impl DeviceOp {
    /// `kind` on a tensor of `shape`; the rows of an all-to-all may differ between members and are left out.
    pub(crate) fn new(kind: DeviceOpKind, dtype: DType, shape: &[usize]) -> Self {
        let mut dims = [1; DIMS];
        for (i, &length) in shape.iter().enumerate() {
            dims[i.min(DIMS - 1)] *= length;
        }
        if matches!(kind, DeviceOpKind::AllToAll { .. }) {
            dims[0] = 0;
        }
        Self { kind, dtype, rank: shape.len().min(DIMS), shape: dims }
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn kind(&self) -> &DeviceOpKind {
        &self.kind
    }

    /// Whether member `me` may issue this where member `peer` issues `theirs`.
    fn agrees(&self, me: usize, theirs: &Self, peer: usize) -> bool {
        let same_tensor = (self.dtype, self.rank, self.shape) == (theirs.dtype, theirs.rank, theirs.shape);
        let same_kind = match (&self.kind, &theirs.kind) {
            (DeviceOpKind::AllToAll { send, receive }, DeviceOpKind::AllToAll { send: sends, receive: receives }) => {
                send.get(peer) == receives.get(me) && receive.get(peer) == sends.get(me)
            }
            (mine, theirs) => mine == theirs,
        };
        same_tensor && same_kind
    }

    /// The record of this as operation `sequence` of the group `label`, issued by its member `member`.
    pub(crate) fn record(&self, label: &str, ranks: &[usize], member: usize, sequence: u64) -> OpRecord {
        let shape = &self.shape[..self.rank];
        let payload = describe(self.dtype, shape);
        let (name, payload) = match &self.kind {
            DeviceOpKind::AllReduce(op) => (format!("all-reduce({})", op.name()), payload),
            DeviceOpKind::AllGather(dim) => (format!("all-gather(dim {dim})"), payload),
            DeviceOpKind::ReduceScatter(dim) => (format!("reduce-scatter(dim {dim})"), payload),
            DeviceOpKind::Broadcast(root) => (format!("broadcast from member {root}"), payload),
            DeviceOpKind::Reduce(root) => (format!("reduce to member {root}"), payload),
            DeviceOpKind::AllToAll { send, receive } => {
                let rows = format!("{:?} rows of {shape:?}, sends {send:?}, receives {receive:?}", self.dtype);
                ("all-to-all".into(), rows)
            }
            DeviceOpKind::Message if member == 0 => (format!("send to rank {}", ranks[1]), payload),
            DeviceOpKind::Message => (format!("receive from rank {}", ranks[0]), payload),
        };
        OpRecord { name, payload, group: label.into(), sequence }
    }
}

/// What the ranks of this process have issued, per group. Those of other processes of the host are compared by
/// [`SharedRecorder`], those on other hosts by [`ReportedOps`].
#[derive(Debug, Default)]
pub(crate) struct FlightRecorder {
    groups: Vec<GroupLog>,
}

#[derive(Debug)]
struct GroupLog {
    /// Per member: whether it runs in this process, and how many operations it has issued.
    members: Vec<(bool, u64)>,
    /// Operations that some members of this process have issued and others have not, oldest first: by whom, and what.
    open: VecDeque<Vec<(usize, DeviceOp)>>,
    /// Sequence number of the first of them.
    oldest: u64,
}

/// A member has issued another operation than a peer at the same position.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Disagreement {
    pub(crate) peer: usize,
    pub(crate) theirs: Box<DeviceOp>,
}

impl FlightRecorder {
    /// Adds the next group; `here[m]` says whether member `m` runs in this process.
    pub(crate) fn add_group(&mut self, here: impl IntoIterator<Item = bool>) {
        let members = here.into_iter().map(|here| (here, 0)).collect();
        self.groups.push(GroupLog { members, open: VecDeque::new(), oldest: 0 });
    }

    /// Notes that `member` issues `op`, its operation [`issued`](Self::issued) of the group.
    ///
    /// # Errors
    /// If a peer has issued something else under this number.
    pub(crate) fn issue(&mut self, group: usize, member: usize, op: &DeviceOp) -> Result<(), Disagreement> {
        let log = &mut self.groups[group];
        let sequence = log.members[member].1;
        log.members[member].1 += 1;
        // An operation that was forgotten can no longer be compared.
        let Some(position) = sequence.checked_sub(log.oldest) else { return Ok(()) };
        match log.open.get_mut(position as usize) {
            None => log.open.push_back(vec![(member, op.clone())]),
            Some(issued) => {
                if let Some((peer, theirs)) = issued.iter().find(|(peer, theirs)| !op.agrees(member, theirs, *peer)) {
                    return Err(Disagreement { peer: *peer, theirs: Box::new(theirs.clone()) });
                }
                // Of what is equal for all, the first is enough; the splits of an all-to-all are compared with each.
                if matches!(op.kind, DeviceOpKind::AllToAll { .. }) {
                    issued.push((member, op.clone()));
                }
            }
        }
        let issued_by_all = log.members.iter().filter(|(here, _)| *here).map(|(_, count)| *count).min().unwrap_or(0);
        while log.oldest < issued_by_all || log.open.len() > OPEN {
            log.open.pop_front();
            log.oldest += 1;
        }
        Ok(())
    }

    /// How many operations `member` has issued.
    pub(crate) fn issued(&self, group: usize, member: usize) -> u64 {
        self.groups[group].members[member].1
    }

    /// The first operation that a peer in this process has issued and `member` has not: its number, the peer, and what.
    pub(crate) fn missed(&self, group: usize, member: usize) -> Option<(u64, usize, &DeviceOp)> {
        let log = &self.groups[group];
        let sequence = log.members[member].1.max(log.oldest);
        let (peer, op) = log.open.get((sequence - log.oldest) as usize)?.first()?;
        Some((sequence, *peer, op))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduce(length: usize) -> DeviceOp {
        DeviceOp::new(DeviceOpKind::AllReduce(ReduceOp::Sum), DType::BF16, &[length])
    }

    fn collective(send: [usize; 3], receive: [usize; 3]) -> DeviceOp {
        let rows = send.iter().sum();
        let kind = DeviceOpKind::AllToAll { send: send.to_vec(), receive: receive.to_vec() };
        DeviceOp::new(kind, DType::BF16, &[rows, 64])
    }

    fn recorder(here: &[bool]) -> FlightRecorder {
        let mut recorder = FlightRecorder::default();
        recorder.add_group(here.iter().copied());
        recorder
    }

    #[test]
    fn members_may_run_ahead_as_long_as_they_agree() {
        let mut recorder = recorder(&[true; 2]);
        for n in 0..100 {
            assert_eq!((recorder.issued(0, 0), recorder.issue(0, 0, &reduce(n))), (n as u64, Ok(())));
        }
        assert_eq!(recorder.missed(0, 1), Some((0, 0, &reduce(0))));
        for n in 0..100 {
            assert_eq!(recorder.issue(0, 1, &reduce(n)), Ok(()));
        }
        assert_eq!((recorder.missed(0, 0), recorder.missed(0, 1)), (None, None));
        assert!(recorder.groups[0].open.is_empty());
    }

    #[test]
    fn whoever_issues_something_else_learns_what_the_peer_issued() {
        let mut recorder = recorder(&[true; 3]);
        recorder.issue(0, 2, &reduce(8)).unwrap();
        recorder.issue(0, 2, &reduce(16)).unwrap();
        recorder.issue(0, 0, &reduce(8)).unwrap();
        let disagreement = Disagreement { peer: 2, theirs: Box::new(reduce(16)) };
        assert_eq!(recorder.issue(0, 0, &reduce(17)), Err(disagreement));
    }

    #[test]
    fn every_pair_of_an_all_to_all_is_compared() {
        let mut recorder = recorder(&[true; 3]);
        let first = collective([1, 2, 3], [1, 4, 5]);
        recorder.issue(0, 0, &first).unwrap();
        let second = collective([4, 0, 6], [2, 0, 7]);
        recorder.issue(0, 1, &second).unwrap();
        // Agrees with member 0, but member 1 sends 6 rows and expects 7.
        let disagreement = Disagreement { peer: 1, theirs: Box::new(second) };
        assert_eq!(recorder.issue(0, 2, &collective([5, 8, 0], [3, 6, 0])), Err(disagreement));
    }

    #[test]
    fn members_of_other_processes_are_not_waited_for() {
        let mut recorder = recorder(&[true, false, true]);
        for n in 0..10 {
            recorder.issue(0, 0, &reduce(n)).unwrap();
            recorder.issue(0, 2, &reduce(n)).unwrap();
        }
        assert!(recorder.groups[0].open.is_empty());
    }

    #[test]
    fn what_was_forgotten_is_not_compared_and_memory_stays_bounded() {
        let mut recorder = recorder(&[true; 2]);
        for n in 0..2 * OPEN {
            recorder.issue(0, 0, &reduce(n)).unwrap();
        }
        assert_eq!(recorder.groups[0].open.len(), OPEN);
        assert_eq!(recorder.issue(0, 1, &reduce(12345)), Ok(()));
        assert_eq!(recorder.missed(0, 1), Some((OPEN as u64, 0, &reduce(OPEN))));
    }

    #[test]
    fn records_read_as_on_the_host() {
        let text = |op: DeviceOp, member| op.record("tp[4, 5]", &[4, 5], member, 7).to_string();
        assert_eq!(text(reduce(3), 0), "all-reduce(sum) BF16 [3] on tp[4, 5] (operation 7 of the group)");
        for (kind, name) in [
            (DeviceOpKind::AllGather(1), "all-gather(dim 1)"),
            (DeviceOpKind::ReduceScatter(0), "reduce-scatter(dim 0)"),
            (DeviceOpKind::Broadcast(1), "broadcast from member 1"),
            (DeviceOpKind::Reduce(0), "reduce to member 0"),
        ] {
            let expected = format!("{name} F64 [2, 3] on tp[4, 5] (operation 7 of the group)");
            assert_eq!(text(DeviceOp::new(kind, DType::F64, &[2, 3]), 0), expected);
        }
        let message = DeviceOp::new(DeviceOpKind::Message, DType::F32, &[2, 1, 1, 1, 1, 3, 5]);
        let shape = "F32 [2, 1, 1, 1, 1, 15] on tp[4, 5] (operation 7 of the group)";
        assert_eq!(text(message.clone(), 0), format!("send to rank 5 {shape}"));
        assert_eq!(text(message, 1), format!("receive from rank 4 {shape}"));
    }
}
