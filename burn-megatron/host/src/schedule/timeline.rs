//! When every rank does what.

use super::Action;

/// A time without a unit: whatever the durations are in.
pub type Ticks = u64;

/// When a rank did something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// What it did.
    pub action: Action,
    /// From when.
    pub start: Ticks,
    /// Until when.
    pub end: Ticks,
}

/// When every rank did what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeline {
    /// The list of each rank with its times, in order of time.
    pub ranks: Vec<Vec<Span>>,
}

impl Timeline {
    /// From the beginning to the end of the last action.
    pub fn makespan(&self) -> Ticks {
        self.ranks.iter().filter_map(|spans| spans.last()).map(|span| span.end).max().unwrap_or(0)
    }

    /// The time a rank computes.
    pub fn busy(&self, rank: usize) -> Ticks {
        let passes = self.ranks[rank].iter().filter(|span| matches!(span.action, Action::Compute(_)));
        passes.map(|span| span.end - span.start).sum()
    }

    /// The time a rank does not compute, until the last rank is done.
    pub fn bubble(&self, rank: usize) -> Ticks {
        self.makespan() - self.busy(rank)
    }

    /// Time not computed over time computed, all ranks together: `(p - 1) / m` for 1F1B.
    pub fn bubble_ratio(&self) -> f64 {
        let [all, busy] = self.totals();
        (all - busy) as f64 / busy.max(1) as f64
    }

    /// The share of the step in which ranks do not compute, all ranks together: `(p - 1) / (m + p - 1)` for 1F1B.
    pub fn idle_share(&self) -> f64 {
        let [all, busy] = self.totals();
        (all - busy) as f64 / all.max(1) as f64
    }

    /// The time of all ranks together, and how long they compute.
    fn totals(&self) -> [u128; 2] {
        let busy = (0..self.ranks.len()).map(|rank| u128::from(self.busy(rank))).sum();
        [u128::from(self.makespan()) * self.ranks.len() as u128, busy]
    }
}
