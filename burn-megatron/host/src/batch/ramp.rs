//! Global batches that grow while a run trains: Megatron's `--rampup-batch-size`
//! (megatron/core/num_microbatches_calculator.py).

use serde::{Deserialize, Serialize};

use super::BatchError;

/// Samples of a ramp, which are counted in `f64`.
const MOST_SAMPLES: u64 = 1 << 48;
/// Sizes of a ramp.
const MOST_INCREMENTS: usize = 1 << 16;

/// A ramp of the global batch. In files `[start, increment, samples]`, as in Megatron.
///
/// ```
/// use host::batch::{BatchRamp, BatchSizes};
///
/// let ramp = BatchRamp { start: 4, increment: 4, samples: 24 };
/// let sizes = BatchSizes { global: 16, ramp: Some(ramp) };
/// assert_eq!([0, 7, 8, 16, 24].map(|consumed| sizes.at(consumed)), [4, 4, 8, 12, 16]);
/// assert_eq!(sizes.samples(4), 4 + 4 + 8 + 12, "of the first four steps");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(usize, usize, u64)", into = "(usize, usize, u64)")]
pub struct BatchRamp {
    /// Sequences of the first step.
    pub start: usize,
    /// By how many sequences the batch grows.
    pub increment: usize,
    /// Samples over which the increments are spread evenly.
    pub samples: u64,
}

impl From<(usize, usize, u64)> for BatchRamp {
    fn from((start, increment, samples): (usize, usize, u64)) -> Self {
        Self { start, increment, samples }
    }
}

impl From<BatchRamp> for (usize, usize, u64) {
    fn from(ramp: BatchRamp) -> Self {
        (ramp.start, ramp.increment, ramp.samples)
    }
}

/// Sequences of every global batch of a run; from a number, they are all of this size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSizes {
    /// Sequences of a batch after the ramp.
    pub global: usize,
    /// How they grow to it.
    pub ramp: Option<BatchRamp>,
}

impl From<usize> for BatchSizes {
    fn from(global: usize) -> Self {
        Self { global, ramp: None }
    }
}

impl BatchSizes {
    /// Sequences of the step that follows `consumed` samples.
    pub fn at(&self, consumed: u64) -> usize {
        match &self.ramp {
            Some(ramp) if consumed <= ramp.samples => ramp.start + ramp.step_at(consumed, self.global) * ramp.increment,
            _ => self.global,
        }
    }

    /// Samples that the first `steps` steps consume.
    pub fn samples(&self, steps: u64) -> u64 {
        let (ramped, consumed) = self.ramp_up(steps, u64::MAX);
        consumed.saturating_add((steps - ramped).saturating_mul(self.global as u64))
    }

    /// The steps from the first one that consume at most `samples` samples.
    pub fn steps(&self, samples: u64) -> u64 {
        let (ramped, consumed) = self.ramp_up(u64::MAX, samples);
        match self.at(consumed) == self.global {
            true => ramped + (samples - consumed) / (self.global as u64).max(1),
            false => ramped,
        }
    }

    /// Every size from the first to the last.
    pub fn all(&self) -> impl Iterator<Item = usize> + use<> {
        let (start, increment) = self.ramp.map_or((self.global, 1), |ramp| (ramp.start, ramp.increment.max(1)));
        (start..=self.global).step_by(increment)
    }

    /// Steps below the full size, of which there are at most `steps` with at most `samples` samples, and their samples.
    fn ramp_up(&self, steps: u64, samples: u64) -> (u64, u64) {
        let Some(ramp) = &self.ramp else { return (0, 0) };
        let (mut done, mut consumed) = (0u64, 0u64);
        while self.at(consumed) < self.global {
            let size = self.at(consumed) as u64;
            let until = ramp.end_of(ramp.step_at(consumed, self.global), self.global);
            let needed = (until - consumed).div_ceil(size);
            let taken = needed.min(steps - done).min((samples - consumed) / size);
            (done, consumed) = (done + taken, consumed + taken * size);
            if taken < needed {
                break;
            }
        }
        (done, consumed)
    }

    /// Whether all sizes can be shared by `unit` sequences at a time. Fails with [`BatchError::Ramp`] and the nearest
    /// ramp that can.
    pub(super) fn check(&self, unit: usize) -> Result<(), BatchError> {
        let Some(ramp) = &self.ramp else { return Ok(()) };
        match ramp.is_legal(self.global, unit) {
            true => Ok(()),
            false => {
                let nearest = ramp.nearest(self.global, unit);
                Err(BatchError::Ramp { ramp: *ramp, global: self.global, unit, nearest })
            }
        }
    }
}

impl BatchRamp {
    /// Increments after `consumed` samples, in Megatron's floats.
    fn step_at(&self, consumed: u64, global: usize) -> usize {
        let increments = self.increments(global);
        let samples_per_increment = self.samples as f64 / increments.max(1) as f64;
        ((consumed as f64 / samples_per_increment) as usize).min(increments)
    }

    fn increments(&self, global: usize) -> usize {
        global.saturating_sub(self.start) / self.increment.max(1)
    }

    /// The samples after which the batch is larger than after `step` increments.
    fn end_of(&self, step: usize, global: usize) -> u64 {
        let is_larger = |consumed: u64| consumed > self.samples || self.step_at(consumed, global) > step;
        let increments = self.increments(global).max(1) as f64;
        let mut end = ((step + 1) as f64 * (self.samples as f64 / increments)) as u64;
        while !is_larger(end) {
            end += 1;
        }
        while end > 0 && is_larger(end - 1) {
            end -= 1;
        }
        end
    }

    fn is_legal(&self, global: usize, unit: usize) -> bool {
        let divides = self.start.is_multiple_of(unit) && self.increment.is_multiple_of(unit);
        let grows = self.start > 0 && self.increment > 0 && self.start < global;
        let arrives = grows && (global - self.start).is_multiple_of(self.increment);
        divides && arrives && self.increments(global) <= MOST_INCREMENTS && (1..=MOST_SAMPLES).contains(&self.samples)
    }

    /// The legal ramp that is nearest; none for a batch of one unit.
    fn nearest(&self, global: usize, unit: usize) -> Option<Self> {
        let units = global / unit;
        let start =
            (self.start.saturating_add(unit / 2) / unit).clamp(1, units.checked_sub(1).filter(|most| *most > 0)?);
        let wanted = self.increment as f64 / unit as f64;
        let rest = units - start;
        let divisors =
            (1..).take_while(|d| d * d <= rest).filter(|d| rest.is_multiple_of(*d)).flat_map(|d| [d, rest / d]);
        let divisors = divisors.filter(|d| rest / d <= MOST_INCREMENTS);
        let distance = |d: &usize| (*d as f64 - wanted).abs();
        let increment = divisors.min_by(|a, b| distance(a).total_cmp(&distance(b)))?;
        Some(Self { start: start * unit, increment: increment * unit, samples: self.samples.clamp(1, MOST_SAMPLES) })
    }
}

/// `[4, 4, 24]`
impl std::fmt::Display for BatchRamp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "[{}, {}, {}]", self.start, self.increment, self.samples)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ramp(start: usize, increment: usize, samples: u64) -> BatchRamp {
        BatchRamp { start, increment, samples }
    }

    #[test]
    fn the_error_names_the_nearest_legal_ramp() {
        let said = |ramp, global, unit| BatchSizes { global, ramp: Some(ramp) }.check(unit).unwrap_err().to_string();
        let text = said(ramp(3, 5, 100), 32, 4);
        assert_eq!(
            text,
            "`rampup-batch-size = [3, 5, 100]` must lead in equal increments to global-batch 32, and start and increment must be \
             multiples of micro-batch x data-parallel = 4; nearest legal: [4, 4, 100]"
        );
        assert!(said(ramp(40, 4, 100), 32, 4).ends_with("nearest legal: [28, 4, 100]"));
        assert!(said(ramp(4, 4, 100), 4, 4).ends_with("nearest legal: none"));
        assert!(said(ramp(8, 12, 1 << 60), 32, 8).ends_with(&format!("nearest legal: [8, 8, {MOST_SAMPLES}]")));
        assert!(said(ramp(1, 1, 9), 1 << 30, 1).contains("nearest legal: [1, "));
        assert_eq!(BatchSizes { global: 32, ramp: Some(ramp(8, 8, 100)) }.check(8), Ok(()));
    }

    proptest! {
        // Megatron's calculator, step by step.
        #[test]
        fn lengths_are_those_of_megatrons_calculator(
            start in 1usize..9, increment in 1usize..9, count in 1usize..9, samples in 1u64..400, steps in 0u64..60
        ) {
            let global = start + increment * count;
            let sizes = BatchSizes { global, ramp: Some(ramp(start, increment, samples)) };
            let megatron = |consumed: u64| match consumed > samples {
                true => global,
                false => start + (consumed as f64 / (samples as f64 / count as f64)) as usize * increment,
            };
            let mut consumed = 0;
            for step in 0..steps {
                prop_assert_eq!(sizes.at(consumed), megatron(consumed));
                prop_assert_eq!((sizes.samples(step), sizes.steps(consumed)), (consumed, step));
                prop_assert_eq!(sizes.steps(consumed + megatron(consumed) as u64 - 1), step);
                consumed += megatron(consumed) as u64;
            }
            prop_assert!(sizes.all().eq((start..=global).step_by(increment)));
        }

        #[test]
        fn without_a_ramp_lengths_are_multiples(global in 1usize..9, steps in 0u64..60) {
            let sizes = BatchSizes::from(global);
            let samples = steps * global as u64;
            prop_assert_eq!((sizes.samples(steps), sizes.steps(samples), sizes.at(samples)), (samples, steps, global));
        }
    }
}
