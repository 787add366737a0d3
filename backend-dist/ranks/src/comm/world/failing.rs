//! How a run ends before its time: the first failure of any rank stops all.

use super::{Activity, State, World};
use crate::comm::failure::{Aborted, FailureCause, LostProcess, OpRecord, RunError};
use parking_lot::MutexGuard;
use std::panic::resume_unwind;
use std::time::{Duration, Instant};

impl World {
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

    /// The first failure that this process knows of.
    pub(crate) fn failure(&self) -> Option<RunError> {
        self.lock().failure.clone()
    }

    pub(super) fn leave_if_failed(&self, state: &mut State) {
        if state.failure.is_some() {
            leave(state);
        }
    }

    /// Ends the run because of what a process has sent. Returns the first failure, whatever it was.
    pub(crate) fn reject(&self, process: usize, what: String) -> RunError {
        self.reject_locked(&mut self.lock(), process, what)
    }

    pub(super) fn reject_locked(&self, state: &mut State, process: usize, what: String) -> RunError {
        let remote = self.remote.as_ref().expect("there is another process");
        let ranks = (process * remote.share, (process + 1) * remote.share - 1);
        let host = remote.hosts[process].clone();
        self.fail_locked(state, ranks.0, FailureCause::Lost(Box::new(LostProcess { process, host, ranks, what })));
        state.failure.clone().expect("it has failed now")
    }

    /// Stops the calling rank because of what `sender`, a rank of another process, has sent.
    pub(super) fn stop_for(&self, sender: usize, what: String) -> ! {
        self.reject(self.process_of(sender), format!("it has sent {what}"));
        leave(&mut self.lock())
    }

    pub(super) fn stop(&self, state: &mut State, rank: usize, cause: FailureCause) -> ! {
        self.fail_locked(state, rank, cause);
        leave(state)
    }

    /// Waits in the name of `rank`, which a deadlock would leave in `waiting`.
    pub(super) fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        rank: usize,
        waiting: Activity,
        ready: impl Fn(&State) -> bool,
    ) -> MutexGuard<'a, State> {
        let (start, patience) = (Instant::now(), self.patience());
        loop {
            self.leave_if_failed(&mut state);
            if ready(&state) {
                state.ranks[rank].activity = Activity::Running;
                state.ranks[rank].waited += start.elapsed();
                return state;
            }
            state.ranks[rank].activity = waiting;
            self.detect_deadlock(&mut state, rank);
            self.leave_if_failed(&mut state);
            let timeout = self.changed.wait_for(&mut state, patience.saturating_sub(start.elapsed()));
            if timeout.timed_out() && !ready(&state) {
                let waiting_in = Box::new(state.ranks[rank].last.clone().expect("a waiting rank has issued something"));
                self.stop(&mut state, rank, FailureCause::Timeout { waiting_in, seconds: patience.as_secs() });
            }
        }
    }

    /// How long a rank of this process has waited for its peers on the host.
    pub(crate) fn waited(&self, rank: usize) -> Duration {
        self.lock().ranks[rank].waited
    }

    /// A circle within this process; one through other processes shows only when somebody's patience ends.
    fn detect_deadlock(&self, state: &mut State, rank: usize) {
        let here = || state.ranks.iter().enumerate().filter(|(rank, _)| self.is_here(*rank)).map(|(_, state)| state);
        let stuck = here().all(|r| matches!(r.activity, Activity::Waiting | Activity::Finished));
        let somebody_waits = here().any(|r| r.activity == Activity::Waiting);
        if stuck && somebody_waits {
            self.fail_locked(state, rank, FailureCause::Deadlock);
        }
    }

    pub(super) fn fail_locked(&self, state: &mut State, rank: usize, cause: FailureCause) {
        if state.failure.is_none() {
            let ranks = (0..state.ranks.len()).map(|r| self.describe(r, state)).collect();
            self.set_failure(state, RunError { rank, coords: self.coords[rank].clone(), cause, ranks });
        }
        self.changed.notify_all();
    }

    /// Puts in what this process knows of its ranks, and process 0 of all but those of the process that reports.
    pub(super) fn completed(&self, state: &State, mut error: RunError, from: usize) -> RunError {
        for (rank, line) in error.ranks.iter_mut().enumerate() {
            if self.process_of(rank) != from {
                *line = self.describe(rank, state);
            }
        }
        error
    }

    /// The run has failed. The threads of [`listen`](Self::listen) do what must be done outside the lock.
    pub(super) fn set_failure(&self, state: &mut State, error: RunError) {
        state.failure = Some(error);
        self.changed.notify_all();
        self.over.notify_all();
    }

    /// The run needs its threads no more.
    pub(super) fn set_all_finished(&self, mut state: MutexGuard<'_, State>) {
        state.ending.all_finished = true;
        self.changed.notify_all();
        self.over.notify_all();
    }

    fn describe(&self, rank: usize, state: &State) -> String {
        let coords = &self.coords[rank];
        let last = state.ranks[rank].last.as_ref().map(OpRecord::to_string);
        // Process 0 knows of the others' ranks which collectives they call; the others know nothing of them.
        let elsewhere = self.remote.as_ref().filter(|_| !self.is_here(rank));
        let doing = match (state.ranks[rank].activity, last) {
            (_, None) if elsewhere.is_some_and(|remote| remote.process > 0) => "not known to this process".to_string(),
            (Activity::Waiting | Activity::WaitingElsewhere, Some(op)) => format!("waiting in {op}"),
            (Activity::Finished, Some(op)) => format!("finished; its last operation was {op}"),
            (Activity::Finished, None) => "finished without any operation".to_string(),
            (Activity::Running, Some(op)) if elsewhere.is_some() => {
                format!("running; its last operation with other processes was {op}")
            }
            (Activity::Running, Some(op)) => format!("running; its last operation was {op}"),
            (Activity::Running, None) => "running; no operation yet".to_string(),
            (Activity::Waiting | Activity::WaitingElsewhere, None) => {
                unreachable!("a waiting rank has issued something")
            }
        };
        #[cfg(any(feature = "cuda", test))]
        let doing = match state.last_on_device(rank) {
            Some(op) => format!("{doing}; on its GPU: {op}"),
            None => doing,
        };
        let process = self.remote.as_ref().map(|remote| {
            let process = remote.process_of(rank);
            format!("process {process} on {}", remote.hosts[process])
        });
        let coords = Some(coords.clone()).filter(|coords| !coords.is_empty());
        let whereabouts: Vec<String> = coords.into_iter().chain(process).collect();
        match whereabouts.is_empty() {
            true => format!("rank {rank}: {doing}"),
            false => format!("rank {rank} ({}): {doing}", whereabouts.join("; ")),
        }
    }
}

/// The calling thread of a rank ends.
fn leave(state: &mut State) -> ! {
    state.ending.note_leaving();
    // It does not run the panic hook: the user sees the first failure, not its echoes.
    resume_unwind(Box::new(Aborted))
}

pub(super) fn mismatch(issued: OpRecord, peer: usize, expected: OpRecord) -> FailureCause {
    FailureCause::Mismatch { issued: Box::new(issued), peer, expected: Box::new(expected) }
}
