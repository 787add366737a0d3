//! When a run ends before its last step without being asked to.

use std::fmt;
use std::time::Duration;

use backend_dist::startup::program_seconds;

/// When a run saves and ends before its last step (Megatron's `--exit-duration-in-mins` and `--exit-interval`). Rank 0
/// decides after every step, for all ranks of all processes.
///
/// ```
/// use std::time::Duration;
/// use burn_megatron::prelude::*;
///
/// // A job of four hours: the last minutes are for the checkpoint.
/// let exit = ExitOptions { duration: Some(Duration::from_secs(230 * 60)), ..ExitOptions::default() };
/// // For `Pretraining::exit`.
/// assert_eq!(exit.interval, None, "no matter after how many steps");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExitOptions {
    /// After the first step that ends so long after the start of the program.
    pub duration: Option<Duration>,
    /// After a step whose number is a multiple of this.
    pub interval: Option<u64>,
}

/// Why a run has ended before its last step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Exit {
    /// It has lasted so many minutes.
    Duration { minutes: f64 },
    /// Of [`ExitOptions::interval`].
    Interval(u64),
}

impl ExitOptions {
    /// Whether a run that began after step `first` and has `last` steps ends after `step`.
    pub(super) fn due(&self, (first, step, last): (u64, u64, u64)) -> Option<Exit> {
        // Asked for only where it matters: it is read from files.
        let seconds = if self.duration.is_some() { program_seconds() } else { 0.0 };
        self.due_at(seconds, (first, step, last))
    }

    fn due_at(&self, seconds: f64, (first, step, last): (u64, u64, u64)) -> Option<Exit> {
        if step <= first || step >= last {
            return None;
        }
        let interval = self.interval.filter(|interval| step.is_multiple_of(*interval)).map(Exit::Interval);
        let late = self.duration.is_some_and(|duration| seconds >= duration.as_secs_f64());
        interval.or(late.then_some(Exit::Duration { minutes: seconds / 60.0 }))
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Duration { minutes } => write!(f, "training.exit-duration-in-mins is over ({minutes:.1} minutes)"),
            Self::Interval(steps) => write!(f, "training.exit-interval = {steps}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_ends_after_a_step_of_its_own_and_before_its_last_one() {
        let exit = ExitOptions { duration: Some(Duration::from_secs(90)), interval: Some(5) };
        let due = |seconds, steps| exit.due_at(seconds, steps);
        assert_eq!([due(0.0, (0, 4, 20)), due(0.0, (0, 0, 20))], [None; 2]);
        assert_eq!(due(0.0, (0, 5, 20)), Some(Exit::Interval(5)));
        assert_eq!(due(200.0, (5, 5, 20)), None, "a resumed run does something first");
        assert_eq!(due(99.0, (5, 6, 20)), Some(Exit::Duration { minutes: 1.65 }));
        assert_eq!(due(99.0, (5, 20, 20)), None, "it is done");
        assert_eq!(ExitOptions::default().due_at(1e9, (0, 5, 20)), None);
        let said = Exit::Duration { minutes: 1.65 }.to_string();
        assert_eq!(said, "training.exit-duration-in-mins is over (1.6 minutes)");
    }
}
