//! What saves cost a run, and whether the next one is worth it.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Instant;

use crate::checkpoint::{Pace, SaveReport};
use crate::metrics::SaveStats;

/// The saves of a run since training began.
pub(super) struct SaveCosts {
    began: Instant,
    /// When to save, where that depends on what saves cost.
    pace: Option<Pace>,
    /// How long training stood still for the saves that are not complete yet, in seconds by step.
    stalls: BTreeMap<u64, f64>,
    /// How long it has done so in all.
    stalled: f64,
    /// Checkpoints that are complete.
    complete: usize,
}

impl SaveCosts {
    /// Training begins now.
    pub fn new(pace: Option<Pace>) -> Self {
        Self { began: Instant::now(), pace, stalls: BTreeMap::new(), stalled: 0.0, complete: 0 }
    }

    /// Whether a save is worth its cost now.
    pub fn is_due(&self) -> bool {
        self.pace.as_ref().is_some_and(|pace| pace.is_due(self.seconds()))
    }

    /// The ranks have handed over the state of a step, for which training stood still so long.
    pub fn begin(&mut self, step: u64, stall: f64) {
        let now = self.seconds();
        self.stalls.insert(step, stall);
        self.stalled += stall;
        if let Some(pace) = &mut self.pace {
            pace.begin(now - stall);
        }
    }

    /// A checkpoint is complete.
    pub fn end(&mut self, &SaveReport { step, bytes, seconds, .. }: &SaveReport) -> SaveStats {
        let stall = self.stalls.remove(&step).unwrap_or(0.0);
        self.complete += 1;
        if let Some(pace) = &mut self.pace {
            pace.end(seconds.max(stall));
        }
        SaveStats { step, bytes, stall, seconds, share: self.stalled / self.seconds() }
    }

    /// Whether there are any.
    pub fn is_empty(&self) -> bool {
        self.complete == 0
    }

    /// Since training began.
    fn seconds(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }
}

impl fmt::Display for SaveCosts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ending, percent) = (if self.complete == 1 { "" } else { "s" }, 100.0 * self.stalled / self.seconds());
        let Self { complete, stalled, .. } = self;
        write!(
            f,
            "saved {complete} checkpoint{ending}; training stood still for {stalled:.2} s, {percent:.1} % of the run"
        )
    }
}
