//! How a run ends before its time: the first failure of any rank stops all.

use super::{Activity, State, World};
use crate::comm::failure::{Aborted, FailureCause, LostProcess, OpRecord, RunError};
use parking_lot::MutexGuard;
use std::panic::resume_unwind;
use std::time::{Duration, Instant};

/// How long the ranks of a process may take to notice a failure: what does not come back from a device by then never
/// will.
const GRACE: Duration = Duration::from_secs(40);
/// How long a process that has failed waits to hear whether another one failed before it.
const VERDICT: Duration = Duration::from_secs(10);

/// A run's last moments.
#[derive(Default)]
pub(super) struct Ending {
    /// The failure is the first of all processes, and this one has passed it on.
    pub settled: bool,
    /// Nothing can go wrong any more: a process may hang up as soon as it has heard that all ranks have finished.
    pub over: bool,
    /// All ranks of all processes have finished, and all processes have been told.
    pub all_finished: bool,
    /// The ranks of this process have stopped.
    pub stopped: bool,
    /// How many threads of ranks of this process have.
    pub threads: usize,
}

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

    /// The first failure of the run, if any, after the ranks of this process have stopped. With other processes, this
    /// waits until all of theirs have finished, or until all know of the failure.
    pub(crate) fn end(&self) -> Option<RunError> {
        let mut state = self.lock();
        state.ending.stopped = true;
        self.changed.notify_all();
        if self.remote.is_none() {
            return state.failure.clone();
        }
        if state.failure.is_none() {
            drop(state);
            self.finish_process();
            state = self.lock();
        }
        let mut failed_at = None;
        loop {
            if state.failure.is_none() && state.ending.all_finished {
                return None;
            }
            if state.failure.is_some() {
                let since = failed_at.get_or_insert_with(Instant::now).elapsed();
                if state.ending.settled || since > VERDICT {
                    return state.failure.clone();
                }
            }
            self.changed.wait_for(&mut state, VERDICT);
        }
    }

    pub(super) fn leave_if_failed(&self, state: &State) {
        if state.failure.is_some() {
            // `resume_unwind` does not run the panic hook: the user sees the first failure, not its echoes.
            resume_unwind(Box::new(Aborted));
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
        resume_unwind(Box::new(Aborted))
    }

    pub(super) fn stop(&self, state: &mut State, rank: usize, cause: FailureCause) -> ! {
        self.fail_locked(state, rank, cause);
        resume_unwind(Box::new(Aborted))
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
            self.leave_if_failed(&state);
            if ready(&state) {
                state.ranks[rank].activity = Activity::Running;
                state.ranks[rank].waited += start.elapsed();
                return state;
            }
            state.ranks[rank].activity = waiting;
            self.detect_deadlock(&mut state, rank);
            self.leave_if_failed(&state);
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

    /// Tells the other processes of the first failure of the run, once there is one.
    pub(super) fn announce_failure(&self) {
        let failure = self.wait_for_failure().failure.clone();
        if let Some(error) = failure {
            self.announce(error);
        }
    }

    /// Ends the process if its ranks do not: one that waits for a device that waits for a dead peer never comes back.
    pub(super) fn end_at_last(&self) {
        let mut state = self.wait_for_failure();
        let (start, grace) = (Instant::now(), self.grace());
        while state.failure.is_some() && !state.ending.stopped && start.elapsed() < grace {
            self.changed.wait_for(&mut state, grace);
        }
        if let (false, Some(failure)) = (state.ending.stopped, &state.failure) {
            self.give_up(failure);
        }
    }

    /// The thread of a rank of this process has ended.
    pub(crate) fn note_ended_thread(&self) {
        self.lock().ending.threads += 1;
        self.over.notify_all();
    }

    /// Waits until so many threads of ranks of this process have ended. Ends the process if it is the only one and a rank
    /// has made the others wait for too long: a thread that hangs cannot be ended.
    pub(crate) fn wait_for_threads(&self, count: usize) {
        let mut state = self.lock();
        let (mut since, grace) = (None, self.grace());
        while state.ending.threads < count {
            let hangs = self.remote.is_none()
                && state.failure.as_ref().is_some_and(|failure| matches!(failure.cause, FailureCause::Timeout { .. }));
            if let (true, Some(failure)) = (hangs, &state.failure)
                && since.get_or_insert_with(Instant::now).elapsed() >= grace
            {
                self.give_up(failure);
            }
            self.over.wait_for(&mut state, grace);
        }
    }

    /// Who does not wait long for a rank that hangs does not wait longer for it to stop.
    fn grace(&self) -> Duration {
        GRACE.min(self.patience())
    }

    fn give_up(&self, failure: &RunError) -> ! {
        let seconds = self.grace().as_secs();
        eprintln!("\n{failure}\nthe ranks of this process did not stop within {seconds} s; it ends here");
        std::process::exit(1);
    }

    /// Waits until the run has failed or ended.
    fn wait_for_failure(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        while state.failure.is_none() && !state.ending.all_finished {
            self.over.wait(&mut state);
        }
        state
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

pub(super) fn mismatch(issued: OpRecord, peer: usize, expected: OpRecord) -> FailureCause {
    FailureCause::Mismatch { issued: Box::new(issued), peer, expected: Box::new(expected) }
}
