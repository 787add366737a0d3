//! Faults on purpose: what a run does when a rank dies, fails, hangs or is slow, or a batch is bad, can be tried out.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use backend_dist::comm::FailureCause;
use backend_dist::launch::BoxError;

/// What goes wrong, for example `kill:rank3@step20,nan@30,slow:rank1:2x`.
///
/// ```
/// use burn_megatron::prelude::Faults;
///
/// let refused = "kill:rank3".parse::<Faults>().unwrap_err();
/// assert_eq!(refused, "fault `kill:rank3` is incomplete; nearest legal: kill:rankR@stepN");
/// let faults: Faults = "kill:rank3@step20, nan@30".parse()?;
/// let refused = faults.check(2, 100).unwrap_err();
/// assert_eq!(refused, "fault kill:rank3@step20: there are ranks 0 to 1 and steps 1 to 100; nearest legal: kill:rank1@step20");
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Faults(Vec<Fault>);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// A rank ends before a step, once.
    End { how: Ending, rank: usize, step: u64 },
    /// The gradients of a step are NaN.
    Nan { step: u64 },
    /// The steps of a rank, or of all, take so many times as long.
    Slow { rank: Option<usize>, factor: f64 },
}

/// How a rank ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Ending {
    /// Its process is killed.
    Kill,
    /// It does nothing any more.
    Hang,
    /// It returns an error.
    Error,
    Panic,
    /// It returns an error, and its device is lost for good.
    Lost,
}

/// The largest factor of a slow rank.
const SLOWEST: f64 = 1e6;

/// The forms of faults, by their first word.
const FORMS: [(&str, &str); 7] = [
    ("kill", "kill:rankR@stepN"),
    ("hang", "hang:rankR@stepN"),
    ("error", "error:rankR@stepN"),
    ("panic", "panic:rankR@stepN"),
    ("lost", "lost:rankR@stepN"),
    ("nan", "nan@N"),
    ("slow", "slow:rankR:Fx or slow:Fx with F from 1 to 1000000"),
];

impl FromStr for Faults {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let fault = |text: &str| fault(text).ok_or_else(|| refusal(text));
        text.split(',').map(|text| fault(text.trim())).collect::<Result<_, _>>().map(Self)
    }
}

fn refusal(text: &str) -> String {
    let word = text.split([':', '@']).next().unwrap_or_default();
    match FORMS.iter().find(|(kind, _)| *kind == word) {
        Some((_, form)) => format!("fault `{text}` is incomplete; nearest legal: {form}"),
        None => format!("fault `{text}` is none of {}", FORMS.map(|(_, form)| form).join(", ")),
    }
}

fn fault(text: &str) -> Option<Fault> {
    if let Some(step) = text.strip_prefix("nan@") {
        return Some(Fault::Nan { step: step.parse().ok()? });
    }
    if let Some(slow) = text.strip_prefix("slow:") {
        let (rank, factor) = match slow.split_once(':') {
            Some((rank, factor)) => (Some(rank.strip_prefix("rank")?.parse().ok()?), factor),
            None => (None, slow),
        };
        let factor: f64 = factor.strip_suffix('x')?.parse().ok()?;
        return (1.0..=SLOWEST).contains(&factor).then_some(Fault::Slow { rank, factor });
    }
    let (kind, rest) = text.split_once(":rank")?;
    let how = match kind {
        "kill" => Ending::Kill,
        "hang" => Ending::Hang,
        "error" => Ending::Error,
        "panic" => Ending::Panic,
        "lost" => Ending::Lost,
        _ => return None,
    };
    let (rank, step) = rest.split_once("@step")?;
    Some(Fault::End { how, rank: rank.parse().ok()?, step: step.parse().ok()? })
}

/// As it is read.
impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::End { how, rank, step } => {
                write!(f, "{}:rank{rank}@step{step}", format!("{how:?}").to_lowercase())
            }
            Self::Nan { step } => write!(f, "nan@{step}"),
            Self::Slow { rank: Some(rank), factor } => write!(f, "slow:rank{rank}:{factor}x"),
            Self::Slow { rank: None, factor } => write!(f, "slow:{factor}x"),
        }
    }
}

impl Faults {
    /// Whether a run of so many ranks and steps has the ranks and steps that are named. Restarts of the launcher, which may
    /// leave fewer ranks, have passed over the first ones that end a rank.
    ///
    /// # Errors
    /// Names the first fault that cannot happen, and the nearest that can.
    pub fn check(&self, ranks: usize, steps: u64) -> Result<(), String> {
        let nearest = |fault: &Fault| {
            let mut nearest = *fault;
            if let Fault::End { rank, .. } | Fault::Slow { rank: Some(rank), .. } = &mut nearest {
                *rank = (*rank).min(ranks.saturating_sub(1));
            }
            if let Fault::End { step, .. } | Fault::Nan { step } = &mut nearest {
                *step = (*step).clamp(1, steps.max(1));
            }
            nearest
        };
        match self.after(launcher_restarts()).find(|fault| nearest(fault) != **fault) {
            None => Ok(()),
            Some(fault) => Err(format!(
                "fault {fault}: there are ranks 0 to {} and steps 1 to {steps}; nearest legal: {}",
                ranks.saturating_sub(1),
                nearest(fault)
            )),
        }
    }

    /// Those that are left after so many restarts: each passes over the first in the list that ends a rank, or a run would
    /// die at the same step for ever.
    fn after(&self, restarts: usize) -> impl Iterator<Item = &Fault> {
        let mut endings = 0;
        self.0.iter().filter(move |fault| {
            endings += usize::from(matches!(fault, Fault::End { .. }));
            !matches!(fault, Fault::End { .. }) || endings > restarts
        })
    }

    /// Whether the gradients of a step are to be NaN.
    pub(super) fn is_nan(&self, step: u64) -> bool {
        self.0.contains(&Fault::Nan { step })
    }

    /// How a rank ends before a step of a run that was begun again so often.
    fn ending(&self, rank: usize, step: u64, restarts: usize) -> Option<Ending> {
        self.after(restarts).find_map(|fault| match *fault {
            Fault::End { how, rank: of, step: at } if (of, at) == (rank, step) => Some(how),
            _ => None,
        })
    }

    /// Whether a rank has failed because its device is lost.
    pub(super) fn is_loss(&self, cause: &FailureCause) -> bool {
        let is = |fault: &Fault| *cause == FailureCause::Error(of_inject(fault));
        self.0.iter().filter(|fault| matches!(fault, Fault::End { how: Ending::Lost, .. })).any(is)
    }

    /// What happens to a rank before a step, counted from 1: nothing, or it does not return. `restarts` are those
    /// within this process; those of its launcher are counted too. Fails if it is to fail. Panics if it is to panic.
    pub(super) fn before(&self, rank: usize, step: u64, restarts: usize) -> Result<(), BoxError> {
        let Some(how) = self.ending(rank, step, restarts + launcher_restarts()) else { return Ok(()) };
        let fault = Fault::End { how, rank, step };
        match how {
            // SAFETY: a signal to this process; nothing is touched.
            Ending::Kill => drop(unsafe { libc::kill(libc::getpid(), libc::SIGKILL) }),
            Ending::Hang => loop {
                std::thread::park();
            },
            Ending::Error | Ending::Lost => return Err(of_inject(&fault).into()),
            Ending::Panic => panic!("{}", of_inject(&fault)),
        }
        Ok(())
    }

    /// How much longer a step of this time takes on a rank.
    pub(super) fn delay(&self, rank: usize, seconds: f64) -> Duration {
        let factor = self.0.iter().filter_map(|fault| match fault {
            Fault::Slow { rank: slow, factor } if slow.is_none_or(|slow| slow == rank) => Some(factor - 1.0),
            _ => None,
        });
        Duration::from_secs_f64(factor.sum::<f64>() * seconds)
    }
}

/// What a rank says that fails on purpose.
fn of_inject(fault: &Fault) -> String {
    format!("fault {fault} of --inject")
}

/// How often torchrun or Slurm have started this process again.
fn launcher_restarts() -> usize {
    let count = |name: &str| std::env::var(name).ok()?.parse::<usize>().ok();
    ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"].into_iter().filter_map(count).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(text: &str) -> Faults {
        text.parse().unwrap()
    }

    #[test]
    fn faults_are_read_and_wrong_ones_are_named() {
        let all = faults(
            "kill:rank3@step20, nan@30,slow:rank1:2.5x,hang:rank0@step4,error:rank2@step1,panic:rank0@step9,lost:rank1@step2",
        );
        let end = |how, rank, step| Fault::End { how, rank, step };
        let expected = [
            end(Ending::Kill, 3, 20),
            Fault::Nan { step: 30 },
            Fault::Slow { rank: Some(1), factor: 2.5 },
            end(Ending::Hang, 0, 4),
            end(Ending::Error, 2, 1),
            end(Ending::Panic, 0, 9),
            end(Ending::Lost, 1, 2),
        ];
        assert_eq!(all.0, expected);
        assert!(all.is_nan(30) && !all.is_nan(20));
        assert_eq!((all.delay(1, 2.0), all.delay(0, 2.0)), (Duration::from_secs(3), Duration::ZERO));
        let slow = faults("slow:2x,slow:rank1:1.5x");
        assert_eq!((slow.delay(0, 2.0), slow.delay(1, 2.0)), (Duration::from_secs(2), Duration::from_secs(3)));
        assert_eq!(slow.0.iter().map(Fault::to_string).collect::<Vec<_>>(), ["slow:2x", "slow:rank1:1.5x"]);
        assert_eq!(slow.check(2, 30), Ok(()));
        for (wrong, form) in [
            ("kill", "kill:rankR@stepN"),
            ("hang:3@step2", "hang:rankR@stepN"),
            ("nan@x", "nan@N"),
            ("slow:rank1:0.5x", "slow:rankR:Fx or slow:Fx with F from 1 to 1000000"),
            ("slow:rank1:2", "slow:rankR:Fx or slow:Fx with F from 1 to 1000000"),
            ("slow:rank1:1e30x", "slow:rankR:Fx or slow:Fx with F from 1 to 1000000"),
            ("slow:2", "slow:rankR:Fx or slow:Fx with F from 1 to 1000000"),
        ] {
            let expected = format!("fault `{wrong}` is incomplete; nearest legal: {form}");
            assert_eq!(wrong.parse::<Faults>().unwrap_err(), expected);
        }
        for wrong in ["", "slip:rank1@step2"] {
            let error = wrong.parse::<Faults>().unwrap_err();
            assert!(error.starts_with(&format!("fault `{wrong}` is none of kill:rankR@stepN, hang:rankR")), "{error}");
        }
    }

    #[test]
    fn ranks_and_steps_that_a_run_does_not_have_are_named_with_the_nearest() {
        let check = |text: &str| faults(text).check(4, 30);
        assert_eq!(check("kill:rank3@step30,nan@1,slow:rank0:2x"), Ok(()));
        for (wrong, nearest) in [
            ("hang:rank4@step2", "hang:rank3@step2"),
            ("error:rank0@step31", "error:rank0@step30"),
            ("nan@0", "nan@1"),
            ("slow:rank9:1.5x", "slow:rank3:1.5x"),
        ] {
            let expected = format!("fault {wrong}: there are ranks 0 to 3 and steps 1 to 30; nearest legal: {nearest}");
            assert_eq!(check(&format!("nan@1,{wrong}")), Err(expected));
        }
    }

    #[test]
    fn a_lost_device_is_told_from_an_error_of_its_rank() {
        let faults = faults("error:rank1@step5,lost:rank1@step7");
        let is_loss = |step: u64| {
            let restarts = usize::from(step > 5);
            let error = faults.before(1, step, restarts).unwrap_err().to_string();
            faults.is_loss(&FailureCause::Error(error))
        };
        assert!(!is_loss(5) && is_loss(7));
    }

    #[test]
    fn a_restart_passes_over_the_fault_that_it_is_for() {
        let faults = faults("error:rank1@step5,nan@3,kill:rank0@step9,error:rank1@step5");
        let at = |restarts| [(1, 5), (0, 9), (0, 5)].map(|(rank, step)| faults.ending(rank, step, restarts));
        assert_eq!(at(0), [Some(Ending::Error), Some(Ending::Kill), None]);
        assert_eq!(at(1), [Some(Ending::Error), Some(Ending::Kill), None], "the second of this rank and step");
        assert_eq!(at(2), [Some(Ending::Error), None, None]);
        assert_eq!(at(3), [None; 3]);
        assert_eq!(faults.after(2).map(Fault::to_string).collect::<Vec<_>>(), ["nan@3", "error:rank1@step5"]);
    }
}
