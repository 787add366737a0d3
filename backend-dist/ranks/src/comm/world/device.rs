//! What the ranks ask of their GPUs, which the host does not wait for.

use super::super::recorder::{DeviceOp, Disagreement, Report, SharedRecorder};
use super::super::remote::{Frame, Head, Remote};
use super::super::{FailureCause, OpRecord};
use super::failing::mismatch;
use super::{Activity, GroupId, GroupState, State, World};
use std::collections::BTreeMap;

/// The last thing a rank has asked of its GPU.
#[derive(Debug)]
pub(super) struct Issued {
    group: GroupId,
    member: usize,
    sequence: u64,
    op: DeviceOp,
}

/// What process 0 has yet to hear of a group whose members compare their operations there.
#[derive(Default)]
pub(super) struct Unreported {
    /// Whether it knows the group.
    is_defined: bool,
    /// By member.
    ops: BTreeMap<usize, Vec<DeviceOp>>,
    /// Members of whose end it has heard.
    finished: Vec<usize>,
}

impl World {
    /// Notes that `member` issues `op`, and returns its sequence number on the group. Does not wait for the peers; ends
    /// the run if one of them has issued something else, or has finished and never will.
    pub(crate) fn issue(&self, group: GroupId, member: usize, op: DeviceOp) -> u64 {
        let mut state = self.lock();
        self.leave_if_failed(&mut state);
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
        let g = &mut state.groups[group.index];
        if group.across && g.shared.is_none() {
            g.unreported.ops.entry(member).or_default().push(issued.op.clone());
        }
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

    /// Tells process 0 what ranks here have issued on groups whose members share no memory, since the last time. One thread
    /// calls this.
    pub(super) fn report_issued(&self, remote: &Remote) {
        let reports = {
            let mut state = self.lock();
            match state.failure {
                Some(_) => Vec::new(),
                None => state.reports(|rank| self.is_here(rank)),
            }
        };
        if reports.is_empty() {
            return;
        }
        if remote.process > 0 {
            remote.send(Some(0), &Frame::from(Head::Issued { reports }));
        } else {
            self.compare_issued(remote, 0, reports).expect("process 0 contradicts nobody");
        }
    }

    /// Process 0: compares what ranks of a process have issued with what their peers have.
    ///
    /// # Errors
    /// If the process contradicts another one or itself.
    pub(super) fn compare_issued(&self, remote: &Remote, from: usize, reports: Vec<Report>) -> Result<(), String> {
        let mut found = None;
        for report in reports {
            let hosted = from * remote.share..(from + 1) * remote.share;
            let mut reported = remote.reported.lock();
            found = found.or(reported.take(from, hosted, self.coords.len(), report)?);
        }
        if let Some((rank, cause)) = found {
            self.fail(rank, cause);
        }
        Ok(())
    }

    /// The record of `op` as operation `sequence` of the group, as its member `member` issues it.
    #[cfg(feature = "cuda")]
    pub(crate) fn device_record(&self, group: GroupId, member: usize, sequence: u64, op: DeviceOp) -> OpRecord {
        self.lock().device_record(&Issued { group, member, sequence, op })
    }

    /// Stops the calling rank if the run has failed.
    #[cfg(feature = "cuda")]
    pub(crate) fn stop_if_failed(&self) {
        self.leave_if_failed(&mut self.lock());
    }
}

impl State {
    /// What process 0 has yet to hear.
    fn reports(&mut self, is_here: impl Fn(usize) -> bool) -> Vec<Report> {
        let Self { groups, ranks, recorder, .. } = self;
        let mut reports = Vec::new();
        let compared = groups.iter_mut().enumerate().filter(|(_, g)| !g.processes.is_empty() && g.shared.is_none());
        for (group, g) in compared {
            for (member, rank) in g.ranks.iter().enumerate().filter(|(_, rank)| is_here(**rank)) {
                let Unreported { is_defined, ops, finished } = &mut g.unreported;
                let ops = ops.remove(&member).unwrap_or_default();
                let has_finished = ranks[*rank].activity == Activity::Finished && !finished.contains(&member);
                if ops.is_empty() && !has_finished {
                    continue;
                }
                finished.extend(has_finished.then_some(member));
                let definition = (!std::mem::replace(is_defined, true)).then(|| (g.label.clone(), g.ranks.clone()));
                let first = recorder.issued(group, member) - ops.len() as u64;
                reports.push(Report { group, definition, member, first, ops, has_finished });
            }
        }
        reports
    }

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
    /// processes have issued is not known here.
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
