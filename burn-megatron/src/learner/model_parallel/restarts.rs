//! How often a run may begin again, and from which copies.

use backend_dist::comm::{FailureCause, RunError};

/// What a run in one process does when a rank fails. Processes that fail are started again by their launcher.
///
/// ```
/// use burn_megatron::prelude::*;
///
/// // A step costs a copy of the state every 50 steps; a failure at most the 50 steps since.
/// // With fewer than two data-parallel ranks it is not worth the time.
/// let restarts = RestartOptions { max_restarts: 3, copy_every: Some(50), min_data_parallel: Some(2) };
/// // For `Pretraining::restarts`.
/// assert_eq!(RestartOptions::default().max_restarts, 0, "the first failure ends the run");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RestartOptions {
    /// How often a run may begin again.
    pub max_restarts: usize,
    /// Steps between two copies in host memory. Without them, a run begins again from its last checkpoint, or from its
    /// start.
    pub copy_every: Option<u64>,
    /// The run continues without the devices that are lost for good, with at least so many data-parallel ranks. `None`: with
    /// all, or not at all.
    pub min_data_parallel: Option<usize>,
}

/// The restarts of a run.
pub(super) struct Restarts {
    most: usize,
    done: usize,
    /// Step, rank and cause of the last failure.
    last: Option<(u64, usize, FailureCause)>,
}

impl Restarts {
    pub fn new(most: usize) -> Self {
        Self { most, done: 0, last: None }
    }

    /// After the ranks were placed on other devices: no failure is like those before.
    pub fn on_other_devices(&mut self) {
        self.last = None;
    }

    /// How many there were.
    pub fn done(&self) -> usize {
        self.done
    }

    /// After a failure in this step: how many are left after one more. The error says why there is none; without words
    /// where there never was to be one.
    pub fn next(&mut self, step: u64, failure: &RunError) -> Result<usize, String> {
        let failure = (step, failure.rank, failure.cause.clone());
        match self.most {
            0 => return Err(String::new()),
            most if most == self.done => return Err(format!("no restart is left of {most}")),
            _ if self.last.as_ref() == Some(&failure) => {
                return Err(format!("no restart: step {step} has failed in the same way before"));
            }
            _ => {}
        }
        self.done += 1;
        self.last = Some(failure);
        Ok(self.most - self.done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(rank: usize, what: &str) -> RunError {
        let cause = FailureCause::Error(what.into());
        RunError { rank, coords: String::new(), cause, ranks: Vec::new() }
    }

    #[test]
    fn restarts_end_when_they_are_used_up_or_would_only_repeat() {
        assert_eq!(Restarts::new(0).next(3, &failure(0, "no data")), Err(String::new()));
        let mut restarts = Restarts::new(3);
        assert_eq!(restarts.next(3, &failure(0, "no data")), Ok(2));
        let again = Err("no restart: step 3 has failed in the same way before".to_string());
        assert_eq!(restarts.next(3, &failure(0, "no data")), again);
        assert_eq!(restarts.next(4, &failure(0, "no data")), Ok(1), "the run has gone further");
        assert_eq!(restarts.next(4, &failure(1, "no data")), Ok(0), "another rank");
        assert_eq!(restarts.next(9, &failure(0, "no data")), Err("no restart is left of 3".to_string()));
        assert_eq!(restarts.done(), 3);
    }
}
