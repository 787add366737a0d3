//! Process 0's part in collectives of several processes, and how all hear what comes of them.

use super::{Activity, State, World};
use crate::comm::failure::FailureCause;
use crate::comm::remote::{Arrival, Blob, Contribution, Frame, Head, Member, Neighbours, OF_PROCESSES, OpKey, Remote};
use std::net::SocketAddr;

impl World {
    /// Process 0: notes that the members of a process have called a collective, and answers all after the last ones.
    ///
    /// # Errors
    /// If the process contradicts another one or itself.
    pub(super) fn coordinate(
        &self,
        remote: &Remote,
        process: usize,
        op: OpKey,
        processes: Vec<usize>,
        contributions: Vec<(Contribution, Blob)>,
    ) -> Result<(), String> {
        if process > 0 && !op.group.ends_with(OF_PROCESSES) {
            let mut state = self.lock();
            for (Contribution { rank, record, .. }, _) in &contributions {
                state.ranks[*rank].activity = Activity::WaitingElsewhere;
                state.ranks[*rank].last = Some(record.clone());
            }
        }
        let mut coordinator = remote.coordinator.lock();
        let arrival = coordinator.contribute(process, op.clone(), processes, contributions);
        drop(coordinator);
        match arrival {
            Arrival::Waits => {}
            Arrival::Never(rank, cause) => self.fail(rank, cause),
            Arrival::Invalid(what) => return Err(what),
            Arrival::Complete(processes, inputs) => {
                let others: Vec<usize> = processes.iter().copied().filter(|process| *process > 0).collect();
                {
                    let mut state = self.lock();
                    others.iter().for_each(|process| self.set_running(&mut state, remote, *process, &op));
                }
                remote.send_gathered(&op, &inputs, &others);
                // This process last: what its ranks do next may be heard of only after this.
                if others.len() < processes.len() {
                    let inputs = inputs.into_iter().map(|input| (input.as_member(), input.blob));
                    self.take_gathered(remote, op, inputs);
                }
            }
        }
        Ok(())
    }

    /// The ranks of another process resume after a collective.
    fn set_running(&self, state: &mut State, remote: &Remote, process: usize, op: &OpKey) {
        for rank in process * remote.share..(process + 1) * remote.share {
            let it = &mut state.ranks[rank];
            if it.last.as_ref().is_some_and(|last| last.group == op.group && last.sequence == op.sequence) {
                it.activity = Activity::Running;
            }
        }
    }

    /// Process 0: all ranks of a process have finished.
    pub(super) fn note_finished(&self, remote: &Remote, process: usize) {
        let mut coordinator = remote.coordinator.lock();
        let waits_for_it = coordinator.finish(process);
        let all = coordinator.finished() == remote.processes();
        drop(coordinator);
        let mut state = self.lock();
        for rank in process * remote.share..(process + 1) * remote.share {
            state.ranks[rank].activity = Activity::Finished;
        }
        if let Some(rank) = waits_for_it {
            self.fail_locked(&mut state, rank, FailureCause::Deadlock);
        }
        if all && state.failure.is_none() {
            state.ending.over = true;
            drop(state);
            remote.send(None, &Head::Finished.into());
            self.set_all_finished(self.lock());
        }
    }

    /// The inputs of other processes are there, for the ranks here that wait for them.
    pub(super) fn take_gathered(&self, remote: &Remote, op: OpKey, inputs: impl IntoIterator<Item = (Member, Blob)>) {
        let is_other = |((_, rank), _): &(Member, Blob)| remote.process_of(*rank) != remote.process;
        let others = inputs.into_iter().filter(is_other).collect();
        self.lock().gathered.insert(op, others);
        self.changed.notify_all();
    }

    /// Waits for the processes below this one; see [`Neighbours`].
    pub(super) fn listen_below(&self, neighbours: &Neighbours) {
        let remote = self.remote.as_ref().expect("there are other processes");
        neighbours.take_in(remote, || self.is_over());
    }

    /// Reads what the process above this one, which waits at `address`, passes on. Where it cannot be reached, process 0
    /// sends here itself.
    pub(super) fn listen_above(&self, neighbours: &Neighbours, above: usize, address: SocketAddr) {
        let remote = self.remote.as_ref().expect("there are other processes");
        let Ok(mut reader) = neighbours.call(remote, address) else { return };
        remote.send(Some(0), &Head::Linked.into());
        let what = loop {
            match Frame::read(&mut reader) {
                Ok(frame @ Frame { head: Head::Gathered { .. }, .. }) => {
                    if let Err(what) = self.handle(remote, above, frame) {
                        break format!("it has sent {what}");
                    }
                }
                Ok(_) => break "it has sent what only process 0 sends".to_string(),
                Err(error) => break format!("its connection to process {} ended ({error})", remote.process),
            }
        };
        // It may have ended as all do, or have died: then process 0 says so.
        let is_open = |state: &mut State| state.failure.is_none() && !state.ending.all_finished;
        let mut state = self.lock();
        self.changed.wait_while_for(&mut state, is_open, remote.silence);
        if !state.ending.all_finished {
            self.reject_locked(&mut state, above, what);
        }
    }

    /// Process 0: how many processes others pass something on to.
    #[cfg(test)]
    pub(crate) fn linked_processes(&self) -> usize {
        self.remote.as_ref().map_or(0, |remote| remote.coordinator.lock().linked.len())
    }

    /// What this process has sent over its connections to and from process 0: frames, and bytes of their blobs.
    #[cfg(test)]
    pub(crate) fn sent(&self) -> (usize, usize) {
        let peers = self.remote.iter().flat_map(|remote| remote.peers.iter().flatten());
        peers.map(|peer| *peer.sent.lock()).fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1))
    }

    fn is_over(&self) -> bool {
        let state = self.lock();
        state.failure.is_some() || state.ending.all_finished
    }
}
