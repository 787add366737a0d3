//! The last moments of a run that has finished or failed: who is waited for, and how long.

use super::{State, World};
use crate::comm::failure::{FailureCause, RunError};
use parking_lot::MutexGuard;
use std::collections::HashSet;
use std::io::{self, Write};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

/// How long the ranks of a process may take to notice a failure: what does not come back from a device by then never
/// will.
const GRACE: Duration = Duration::from_secs(40);
/// How long after a timeout a rank is waited for that has not noticed it, once those that have are done: it is the one
/// that hangs.
const LINGER: Duration = Duration::from_secs(3);
/// The same with GPUs, on which kernels are aborted first.
#[cfg(feature = "cuda")]
const LINGER_ON_GPUS: Duration = Duration::from_secs(10);
/// How often is looked whether ranks have stopped.
const POLL: Duration = Duration::from_millis(100);
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
    /// Threads of ranks that have noticed the failure and are on their way out.
    leaving: HashSet<ThreadId>,
    /// When the last one of a rank was out.
    left: Option<Instant>,
}

impl Ending {
    /// The calling thread of a rank is on its way out.
    pub fn note_leaving(&mut self) {
        self.leaving.insert(thread::current().id());
    }
}

impl World {
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
        let failed = Instant::now();
        while state.failure.is_some() && !state.ending.stopped && !self.is_overdue(&state, failed) {
            self.changed.wait_for(&mut state, POLL);
        }
        if let (false, Some(failure)) = (state.ending.stopped, &state.failure) {
            give_up(failure, failed);
        }
    }

    /// The thread of a rank of this process has ended.
    pub(crate) fn note_ended_thread(&self) {
        self.note_left();
        self.lock().ending.threads += 1;
        self.over.notify_all();
    }

    /// This thread of a rank holds nothing of the rank any more.
    pub(crate) fn note_left(&self) {
        let ending = &mut self.lock().ending;
        ending.leaving.remove(&thread::current().id());
        ending.left = Some(Instant::now());
    }

    /// Waits until so many threads of ranks of this process have ended. Ends the process if it is the only one and a rank
    /// has made the others wait for too long: a thread that hangs cannot be ended.
    pub(crate) fn wait_for_threads(&self, count: usize) {
        let mut state = self.lock();
        let mut since = None;
        while state.ending.threads < count {
            let Some(failure) = state.failure.as_ref().filter(|_| self.remote.is_none() && has_timed_out(&state))
            else {
                self.over.wait_for(&mut state, GRACE);
                continue;
            };
            let failed = *since.get_or_insert_with(Instant::now);
            if self.is_overdue(&state, failed) {
                give_up(failure, failed);
            }
            self.over.wait_for(&mut state, POLL);
        }
    }

    /// Whether ranks that have not stopped since the run has `failed` never will: after a long time in any case, and a little
    /// after a timeout if the others are out, since then somebody hangs.
    fn is_overdue(&self, state: &State, failed: Instant) -> bool {
        let last = state.ending.left.map_or(failed, |left| left.max(failed));
        let only_hang = has_timed_out(state) && state.ending.leaving.is_empty();
        failed.elapsed() >= self.grace() || only_hang && last.elapsed() >= self.linger()
    }

    /// The same for the watchdog of the GPUs.
    #[cfg(feature = "cuda")]
    pub(super) fn is_too_late(&self, failed: Instant) -> bool {
        self.is_overdue(&self.lock(), failed)
    }

    #[cfg(not(feature = "cuda"))]
    fn linger(&self) -> Duration {
        LINGER
    }

    #[cfg(feature = "cuda")]
    fn linger(&self) -> Duration {
        if self.links.is_watched() { LINGER_ON_GPUS } else { LINGER }
    }

    /// Who does not wait long for a rank that hangs does not wait longer for it to stop.
    fn grace(&self) -> Duration {
        GRACE.min(self.patience())
    }

    /// Waits until the run has failed or ended.
    fn wait_for_failure(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        while state.failure.is_none() && !state.ending.all_finished {
            self.over.wait(&mut state);
        }
        state
    }
}

fn has_timed_out(state: &State) -> bool {
    state.failure.as_ref().is_some_and(|failure| matches!(failure.cause, FailureCause::Timeout { .. }))
}

fn give_up(failure: &RunError, failed: Instant) -> ! {
    let seconds = failed.elapsed().as_secs();
    // A panic of this thread would leave the process to wait for ever.
    let _ =
        writeln!(io::stderr(), "\n{failure}\nthe ranks of this process did not stop within {seconds} s; it ends here");
    std::process::exit(1);
}
