//! What the ranks ask of their GPUs, which the host does not wait for.

use super::super::recorder::{DeviceOp, Disagreement, SharedRecorder};
use super::super::{FailureCause, OpRecord};
use super::failing::mismatch;
use super::{Activity, GroupId, GroupState, State, World};

/// The last thing a rank has asked of its GPU.
#[derive(Debug)]
pub(super) struct Issued {
    group: GroupId,
    member: usize,
    sequence: u64,
    op: DeviceOp,
}

impl World {
    /// Notes that `member` issues `op`, and returns its sequence number on the group. Does not wait for the peers; ends
    /// the run if one of them has issued something else, or has finished and never will.
    pub(crate) fn issue(&self, group: GroupId, member: usize, op: DeviceOp) -> u64 {
        let mut state = self.lock();
        self.leave_if_failed(&state);
        let rank = state.groups[group.index].ranks[member];
        let sequence = state.recorder.issued(group.index, member);
        let issued = Issued { group, member, sequence, op };
        let compared = state.recorder.issue(group.index, member, &issued.op).and_then(|()| {
            let GroupState { ranks, shared, .. } = &state.groups[group.index];
            let elsewhere = (0..ranks.len()).filter(|&peer| !self.is_here(ranks[peer]));
            shared.as_ref().map_or(Ok(()), |shared| shared.issue(member, sequence, &issued.op, elsewhere))
        });
        let cause = match compared {
            Err(Disagreement { peer, theirs }) => {
                let expected = state.device_record(&Issued { group, member: peer, sequence, op: *theirs });
                let peer = state.groups[group.index].ranks[peer];
                Some((rank, mismatch(state.device_record(&issued), peer, expected)))
            }
            Ok(()) => state.finished_before(group, sequence, |rank| self.is_here(rank)).map(|absent| {
                let waiting_in = Box::new(state.device_record(&issued));
                (absent, FailureCause::Missing { peer: rank, waiting_in })
            }),
        };
        state.ranks[rank].issued = Some(issued);
        if let Some((rank, cause)) = cause {
            self.stop(&mut state, rank, cause);
        }
        sequence
    }

    /// From now on the operations of a group's members in other processes of this host are compared too.
    pub(crate) fn share_recorder(&self, group: GroupId, shared: SharedRecorder) {
        // Every rank of this process brings the same memory.
        self.lock().groups[group.index].shared.get_or_insert(shared);
    }

    /// The record of `op` as operation `sequence` of the group, as its member `member` issues it.
    #[cfg(feature = "cuda")]
    pub(crate) fn device_record(&self, group: GroupId, member: usize, sequence: u64, op: DeviceOp) -> OpRecord {
        self.lock().device_record(&Issued { group, member, sequence, op })
    }

    /// Stops the calling rank if the run has failed.
    #[cfg(feature = "cuda")]
    pub(crate) fn stop_if_failed(&self) {
        self.leave_if_failed(&self.lock());
    }
}

impl State {
    /// Text of the last thing `rank` has asked of its GPU.
    pub(super) fn last_on_device(&self, rank: usize) -> Option<OpRecord> {
        self.ranks[rank].issued.as_ref().map(|issued| self.device_record(issued))
    }

    /// Why `rank` may not finish now: a peer's GPU waits for something that `rank` will not issue.
    pub(super) fn is_missed(&self, rank: usize) -> Option<FailureCause> {
        self.groups.iter().enumerate().find_map(|(group, g)| {
            let member = g.ranks.iter().position(|&r| r == rank)?;
            let (sequence, peer, op) = self.recorder.missed(group, member)?;
            let group = GroupId { index: group, across: !g.processes.is_empty() };
            let issued = Issued { group, member: peer, sequence, op: op.clone() };
            let waiting_in = Box::new(self.device_record(&issued));
            Some(FailureCause::Missing { peer: g.ranks[peer], waiting_in })
        })
    }

    /// The rank of a member of this process that has finished without issuing operation `sequence`; what those of other
    /// processes have issued is not known.
    fn finished_before(&self, group: GroupId, sequence: u64, is_here: impl Fn(usize) -> bool) -> Option<usize> {
        self.groups[group.index].ranks.iter().enumerate().find_map(|(member, &rank)| {
            let is_absent = is_here(rank)
                && self.ranks[rank].activity == Activity::Finished
                && self.recorder.issued(group.index, member) <= sequence;
            is_absent.then_some(rank)
        })
    }

    fn device_record(&self, Issued { group, member, sequence, op }: &Issued) -> OpRecord {
        let group = &self.groups[group.index];
        op.record(&group.label, &group.ranks, *member, *sequence)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::recorder::DeviceOpKind;
    use super::super::super::{Aborted, ReduceOp, RunError};
    use super::*;
    use burn::tensor::DType;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;

    fn world() -> (Arc<World>, GroupId) {
        let world = World::new(vec!["tp 0".into(), "tp 1".into()]);
        let group = world.group("tp", &[0, 1]);
        (world, group)
    }

    fn gather(rows: usize) -> DeviceOp {
        DeviceOp::new(DeviceOpKind::AllGather(0), DType::F32, &[rows, 4])
    }

    fn failure_of(world: &World, f: impl FnOnce()) -> RunError {
        let payload = catch_unwind(AssertUnwindSafe(f)).expect_err("the rank stops");
        assert!(payload.is::<Aborted>());
        world.failure().expect("the run has failed")
    }

    #[test]
    fn ranks_issue_without_waiting_and_a_mismatch_names_both() {
        let (world, group) = world();
        assert_eq!((world.issue(group, 0, gather(2)), world.issue(group, 0, gather(3))), (0, 1));
        assert_eq!(world.issue(group, 1, gather(2)), 0);
        let sum = DeviceOp::new(DeviceOpKind::AllReduce(ReduceOp::Sum), DType::F32, &[3, 4]);
        let error = failure_of(&world, || {
            world.issue(group, 1, sum);
        });
        let text = error.to_string();
        assert!(
            text.contains(
                "rank 1 (tp 1) issued all-reduce(sum) F32 [3, 4] on tp[0, 1] (operation 1 of the group), but rank 0 \
                 issued all-gather(dim 0) F32 [3, 4] on tp[0, 1] (operation 1 of the group)"
            ),
            "{text}"
        );
        let line = "rank 0 (tp 0): running; no operation yet; on its GPU: all-gather(dim 0) F32 [3, 4] on tp[0, 1]";
        assert!(error.ranks[0].starts_with(line), "{text}");
        // Everybody stops at the next operation.
        failure_of(&world, || {
            world.issue(group, 0, gather(2));
        });
    }

    #[test]
    fn a_rank_that_finishes_early_is_named() {
        let (world, group) = world();
        world.issue(group, 0, gather(2));
        world.finish(1);
        let error = world.failure().expect("rank 0 waits for ever");
        assert!(matches!(&error.cause, FailureCause::Missing { peer: 0, .. }), "{error}");
        let text = "rank 1 (tp 1) has finished without all-gather(dim 0) F32 [2, 4] on tp[0, 1] (operation 0 of the \
                    group), in which rank 0 waits";
        assert!(error.to_string().starts_with(text), "{error}");
    }

    #[test]
    fn what_nobody_can_answer_ends_the_run_when_it_is_issued() {
        let (world, group) = world();
        world.issue(group, 0, gather(2));
        world.issue(group, 1, gather(2));
        world.finish(1);
        assert_eq!(world.failure(), None);
        let error = failure_of(&world, || {
            world.issue(group, 0, gather(2));
        });
        assert_eq!(error.rank, 1);
        assert!(matches!(&error.cause, FailureCause::Missing { peer: 0, .. }), "{error}");
    }
}
