//! A weighted running mean with its latest value.

use burn::train::metric::NumericEntry;

/// Weighted mean of the values since the last [`clear`](Running::clear), and the latest one.
#[derive(Clone, Debug, Default)]
pub(super) struct Running {
    sum: f64,
    weight: u64,
    last: f64,
    last_weight: u64,
}

impl Running {
    pub fn push(&mut self, value: f64, weight: u64) {
        self.last = value;
        self.last_weight = weight;
        self.sum += value * weight as f64;
        self.weight += weight;
    }

    pub fn last(&self) -> f64 {
        self.last
    }

    /// NaN before the first value.
    pub fn mean(&self) -> f64 {
        self.sum / self.weight as f64
    }

    /// The latest value as a dashboard entry, shown through `view` (for example `exp` for a perplexity).
    pub fn last_entry(&self, view: fn(f64) -> f64) -> NumericEntry {
        NumericEntry::Aggregated { aggregated_value: view(self.last), count: self.last_weight as usize }
    }

    /// The mean as a dashboard entry, shown through `view`.
    pub fn mean_entry(&self, view: fn(f64) -> f64) -> NumericEntry {
        NumericEntry::Aggregated { aggregated_value: view(self.mean()), count: self.weight as usize }
    }

    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_is_weighted_by_tokens_and_the_view_applies_after_it() {
        let mut running = Running::default();
        running.push(1.0, 300);
        running.push(3.0, 100);
        assert_eq!(running.mean(), 1.5);
        assert_eq!(running.last(), 3.0);
        assert_eq!(running.mean_entry(f64::exp).current(), 1.5f64.exp());
        running.clear();
        assert!(running.mean().is_nan());
    }
}
