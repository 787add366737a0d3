//! How often a run saves: after so many steps, or as often as costs little.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The largest share of a run's time that its saves take where [`SaveEvery::Auto`] decides.
const SHARE: f64 = 0.05;
/// Seconds of training between two such saves at least: less is done again in no time.
const LEAST: f64 = 5.0;

/// When a run saves before its last step, which is saved in any case.
///
/// ```
/// use host::checkpoint::SaveEvery;
///
/// assert!(SaveEvery::Steps(500).is_due(1500));
/// // In configuration files and command lines: a number, or nothing.
/// assert_eq!(SaveEvery::from(Some(500)), SaveEvery::Steps(500));
/// assert_eq!(SaveEvery::from(None::<u64>), SaveEvery::Never);
/// assert_eq!(SaveEvery::default().to_string(), "as often as takes 5 % of the time");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Option<Written>", into = "Option<Written>")]
pub enum SaveEvery {
    /// As often as leaves at most 5 % of the run's time to saves, measured while it runs. A save counts from its start
    /// until it is on disk, also where it is written in the background.
    #[default]
    Auto,
    /// After every so many steps.
    Steps(u64),
    /// Only when burn-train's checkpointing strategy wants it.
    Never,
}

impl SaveEvery {
    /// Whether a save is due after this step, whatever saves cost.
    pub fn is_due(self, step: u64) -> bool {
        matches!(self, Self::Steps(every) if step.is_multiple_of(every.max(1)))
    }

    /// Most saves of a run from behind step `from` to step `last`, which is saved in any case; `None` if no step says.
    pub fn saves(self, from: u64, last: u64) -> Option<u64> {
        let Self::Steps(every) = self else { return None };
        Some((last.div_ceil(every.max(1))).saturating_sub(from / every.max(1)))
    }
}

/// Steps between two saves; none: [`SaveEvery::Never`].
impl From<Option<u64>> for SaveEvery {
    fn from(steps: Option<u64>) -> Self {
        steps.map_or(Self::Never, Self::Steps)
    }
}

impl fmt::Display for SaveEvery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => write!(f, "as often as takes {} % of the time", SHARE * 100.0),
            Self::Steps(1) => f.write_str("every step"),
            Self::Steps(steps) => write!(f, "every {steps} steps"),
            Self::Never => f.write_str("at the end"),
        }
    }
}

/// In files: a number, `"auto"`, or nothing.
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(untagged)]
enum Written {
    Steps(u64),
    Word(Word),
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Word {
    Auto,
}

impl From<Option<Written>> for SaveEvery {
    fn from(written: Option<Written>) -> Self {
        match written {
            Some(Written::Steps(steps)) => Self::Steps(steps),
            Some(Written::Word(Word::Auto)) => Self::Auto,
            None => Self::Never,
        }
    }
}

impl From<SaveEvery> for Option<Written> {
    fn from(every: SaveEvery) -> Self {
        match every {
            SaveEvery::Auto => Some(Written::Word(Word::Auto)),
            SaveEvery::Steps(steps) => Some(Written::Steps(steps)),
            SaveEvery::Never => None,
        }
    }
}

/// Decides when the next save is worth its cost. All times are seconds since training began.
#[derive(Clone, Debug)]
#[doc(hidden)]
pub struct Pace {
    /// What the next save is expected to cost.
    cost: f64,
    /// What the saves so far have cost.
    spent: f64,
    /// When the last save began.
    last: f64,
    /// That save is not on disk yet.
    pending: bool,
}

impl Pace {
    /// `cost` is an estimate for the first save.
    pub fn new(cost: f64) -> Self {
        Self { cost, spent: 0.0, last: 0.0, pending: false }
    }

    /// Whether to save now: the time since the last save is worth one, and so is the time since the beginning.
    pub fn is_due(&self, now: f64) -> bool {
        let since = now - self.last;
        !self.pending && since >= LEAST && since * SHARE >= self.cost && now * SHARE >= self.spent + self.cost
    }

    /// A save begins.
    pub fn begin(&mut self, now: f64) {
        (self.last, self.pending) = (now, true);
    }

    /// A save is on disk and has cost so much.
    pub fn end(&mut self, cost: f64) {
        (self.cost, self.pending) = (cost, false);
        self.spent += cost;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `seconds` with steps of one, where save `i` takes `cost(i)`; returns when saves began and the share that
    /// they took of the time up to the end of the last one.
    fn simulate(seconds: f64, estimate: f64, background: bool, cost: impl Fn(usize) -> f64) -> (Vec<f64>, f64) {
        let (mut pace, mut now, mut saves) = (Pace::new(estimate), 0.0, Vec::new());
        let (mut spent, mut ends) = (0.0, None);
        while now < seconds {
            now += 1.0;
            if let Some((_, cost)) = ends.take_if(|(end, _)| *end <= now) {
                pace.end(cost);
            }
            if pace.is_due(now) {
                let cost = cost(saves.len());
                saves.push(now);
                pace.begin(now);
                spent += cost;
                match background {
                    true => ends = Some((now + cost, cost)),
                    false => {
                        now += cost;
                        pace.end(cost);
                    }
                }
            }
        }
        let share = spent / now;
        (saves, share)
    }

    #[test]
    fn a_run_has_as_many_saves_as_its_steps_say() {
        let of = |from, last| SaveEvery::Steps(10).saves(from, last).unwrap();
        assert_eq!([of(0, 10), of(0, 9), of(0, 25), of(10, 25), of(7, 25), of(20, 20)], [1, 1, 3, 2, 3, 0]);
        assert_eq!([SaveEvery::Auto, SaveEvery::Never].map(|every| every.saves(0, 10)), [None, None]);
    }

    #[test]
    fn saves_take_a_twentieth_of_the_run_at_most() {
        for background in [false, true] {
            let (saves, share) = simulate(10_000.0, 2.0, background, |_| 2.0);
            assert!((0.045..=SHARE).contains(&share), "{share}");
            assert!(saves[0] == 40.0 && saves.windows(2).all(|pair| pair[1] - pair[0] >= 40.0), "{saves:?}");
        }
    }

    #[test]
    fn a_wrong_estimate_is_corrected_by_what_the_first_save_costs() {
        // 17 GB, estimated at 1 s: the overrun is made up for, and the bound holds.
        let (saves, share) = simulate(20_000.0, 1.0, false, |_| 60.0);
        assert_eq!(saves[0], 20.0);
        assert!(saves[1] - saves[0] >= 1200.0, "{saves:?}");
        assert!(share <= SHARE + 60.0 / 20_000.0, "{share}");
        // Estimated at 60 s, where a save takes 1 s.
        let (saves, _) = simulate(2_000.0, 60.0, false, |_| 1.0);
        assert_eq!(saves[0], 1200.0);
        assert!((20.0..23.0).contains(&(saves[1] - saves[0])), "{saves:?}");
    }

    #[test]
    fn cheap_saves_are_not_made_all_the_time_and_slow_ones_not_at_once_twice() {
        let (saves, _) = simulate(100.0, 1e-3, false, |_| 1e-3);
        assert!(saves.windows(2).all(|pair| pair[1] - pair[0] >= LEAST), "{saves:?}");
        let mut pace = Pace::new(0.1);
        pace.begin(20.0);
        assert!(!pace.is_due(10_000.0), "the save before is still being written");
        pace.end(30.0);
        assert!(pace.is_due(10_000.0));
        // A run shorter than a save is worth saves at its end only.
        assert_eq!(simulate(300.0, 17.0, true, |_| 17.0).0, [0.0; 0]);
    }

    #[test]
    fn what_is_written_is_read_again() {
        for (every, json) in [(SaveEvery::Auto, "\"auto\""), (SaveEvery::Steps(7), "7"), (SaveEvery::Never, "null")] {
            assert_eq!(serde_json::to_string(&every).unwrap(), json);
            assert_eq!(serde_json::from_str::<SaveEvery>(json).unwrap(), every);
        }
        assert!(serde_json::from_str::<SaveEvery>("\"often\"").is_err());
        assert_eq!([2, 3, 6].map(|step| SaveEvery::Steps(3).is_due(step)), [false, true, true]);
        assert!(!SaveEvery::Auto.is_due(3) && !SaveEvery::Never.is_due(3));
    }
}
