//! Faults on purpose: what a run does when a rank dies, hangs or is slow, or a batch is bad, can be tried out.

use std::str::FromStr;
use std::time::Duration;

/// What goes wrong, for example `kill:rank3@step20,nan@30,slow:rank1:2x`.
///
/// ```
/// use burn_megatron::prelude::Faults;
///
/// let refused = "kill:rank3".parse::<Faults>().unwrap_err();
/// assert_eq!(refused, "fault `kill:rank3` is none of kill:rankR@stepN, hang:rankR@stepN, nan@N and slow:rankR:Fx");
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Faults(Vec<Fault>);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// The process of a rank is killed before a step.
    Kill { rank: usize, step: u64 },
    /// A rank does nothing any more.
    Hang { rank: usize, step: u64 },
    /// The gradients of a step are NaN.
    Nan { step: u64 },
    /// The steps of a rank take so many times as long.
    Slow { rank: usize, factor: f64 },
}

impl FromStr for Faults {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let legal = "kill:rankR@stepN, hang:rankR@stepN, nan@N and slow:rankR:Fx";
        let fault = |text: &str| fault(text).ok_or_else(|| format!("fault `{text}` is none of {legal}"));
        text.split(',').map(|text| fault(text.trim())).collect::<Result<_, _>>().map(Self)
    }
}

fn fault(text: &str) -> Option<Fault> {
    let at_step = |text: &str| {
        let (rank, step) = text.strip_prefix("rank")?.split_once("@step")?;
        Some((rank.parse().ok()?, step.parse().ok()?))
    };
    if let Some(step) = text.strip_prefix("nan@") {
        return Some(Fault::Nan { step: step.parse().ok()? });
    }
    let (kind, rest) = text.split_once(':')?;
    match kind {
        "kill" => at_step(rest).map(|(rank, step)| Fault::Kill { rank, step }),
        "hang" => at_step(rest).map(|(rank, step)| Fault::Hang { rank, step }),
        "slow" => {
            let (rank, factor) = rest.strip_prefix("rank")?.split_once(':')?;
            let factor: f64 = factor.strip_suffix('x')?.parse().ok()?;
            (factor >= 1.0).then_some(Fault::Slow { rank: rank.parse().ok()?, factor })
        }
        _ => None,
    }
}

impl Faults {
    /// Whether the gradients of a step are to be NaN.
    pub(super) fn is_nan(&self, step: u64) -> bool {
        self.0.contains(&Fault::Nan { step })
    }

    /// What happens to a rank before a step, counted from 1: nothing, or it does not return. A process that torchrun has
    /// started again is left in peace, or it would die at the same step for ever.
    pub(super) fn before(&self, rank: usize, step: u64) {
        let restarted = || std::env::var("TORCHELASTIC_RESTART_COUNT").is_ok_and(|count| count != "0");
        if self.0.contains(&Fault::Kill { rank, step }) && !restarted() {
            // SAFETY: a signal to this process; nothing is touched.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
        if self.0.contains(&Fault::Hang { rank, step }) && !restarted() {
            loop {
                std::thread::park();
            }
        }
    }

    /// How much longer a step of this time takes on a rank.
    pub(super) fn delay(&self, rank: usize, seconds: f64) -> Duration {
        let factor = self.0.iter().filter_map(|fault| match fault {
            Fault::Slow { rank: slow, factor } if *slow == rank => Some(factor - 1.0),
            _ => None,
        });
        Duration::from_secs_f64(factor.sum::<f64>() * seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read_and_wrong_ones_are_named() {
        let faults: Faults = "kill:rank3@step20, nan@30,slow:rank1:2.5x,hang:rank0@step4".parse().unwrap();
        let expected = [
            Fault::Kill { rank: 3, step: 20 },
            Fault::Nan { step: 30 },
            Fault::Slow { rank: 1, factor: 2.5 },
            Fault::Hang { rank: 0, step: 4 },
        ];
        assert_eq!(faults.0, expected);
        assert!(faults.is_nan(30) && !faults.is_nan(20));
        assert_eq!((faults.delay(1, 2.0), faults.delay(0, 2.0)), (Duration::from_secs(3), Duration::ZERO));
        for wrong in
            ["", "kill", "kill:rank3", "kill:3@step2", "nan@x", "slow:rank1:0.5x", "slow:rank1:2", "slip:rank1@step2"]
        {
            let error = wrong.parse::<Faults>().unwrap_err();
            assert!(error.starts_with(&format!("fault `{wrong}` is none of kill:rankR@stepN")), "{error}");
        }
    }
}
