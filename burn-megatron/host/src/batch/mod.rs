//! How a global batch is split into micro-batches: pure arithmetic, no tensors.

mod ramp;

pub use ramp::{BatchRamp, BatchSizes};
use std::ops::Range;

/// Sizes of one optimizer step: `global = micro × accumulation × data_parallel`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchPlan {
    /// Rows of one forward/backward pass on one data-parallel rank.
    pub micro: usize,
    /// Micro-batches that a rank accumulates before the optimizer step.
    pub accumulation: usize,
    /// Data-parallel ranks.
    pub data_parallel: usize,
}

/// A batch that cannot be split as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum BatchError {
    /// One of the sizes is zero.
    #[error("`{key}` must be at least 1, it is 0")]
    Zero { key: &'static str },
    /// `global` is not a multiple of `micro × data_parallel`.
    #[error(
        "`global-batch {global}` is not a multiple of micro-batch {micro} x data-parallel {data_parallel} = {unit}; \
         nearest legal global batch: {}{}",
        nearest(*.global, *.unit),
        micro_hint(*.global, *.micro, *.data_parallel)
    )]
    NotDivisible { global: usize, micro: usize, data_parallel: usize, unit: usize },
    /// A ramp of the batch with sizes that cannot be split, or that does not arrive.
    #[error(
        "`rampup-batch-size = {ramp}` must lead in equal increments to global-batch {global}, and start and increment must be \
         multiples of micro-batch x data-parallel = {unit}; nearest legal: {}",
        nearest.map_or("none".into(), |ramp| ramp.to_string())
    )]
    Ramp { ramp: BatchRamp, global: usize, unit: usize, nearest: Option<BatchRamp> },
}

/// The multiples of `unit` around `value`, as text.
fn nearest(value: usize, unit: usize) -> String {
    let below = value / unit * unit;
    if below == 0 { format!("{unit}") } else { format!("{below} or {}", below + unit) }
}

/// The micro-batch nearest to the asked one that does divide the global batch, as text; empty where none exists.
fn micro_hint(global: usize, micro: usize, data_parallel: usize) -> String {
    if !global.is_multiple_of(data_parallel) {
        return String::new();
    }
    let sequences = global / data_parallel;
    let best = (1..=sequences).filter(|m| sequences.is_multiple_of(*m)).min_by_key(|m| m.abs_diff(micro));
    best.map_or(String::new(), |m| format!("; or keep {global} with micro-batch {m}"))
}

impl BatchPlan {
    /// The plan of a global batch of `global` sequences in micro-batches of `micro` sequences over `data_parallel` ranks.
    ///
    /// # Errors
    /// [`BatchError`] where a size is zero or the three do not divide; it names the nearest legal values.
    pub fn from_global(global: usize, micro: usize, data_parallel: usize) -> Result<Self, BatchError> {
        for (key, value) in [("global-batch", global), ("micro-batch", micro), ("data-parallel", data_parallel)] {
            if value == 0 {
                return Err(BatchError::Zero { key });
            }
        }
        let unit = micro * data_parallel;
        if !global.is_multiple_of(unit) {
            return Err(BatchError::NotDivisible { global, micro, data_parallel, unit });
        }
        Ok(Self { micro, accumulation: global / unit, data_parallel })
    }

    /// The plan of the step that follows `consumed` samples in a run with batches of these sizes, all of which must
    /// divide.
    ///
    /// # Errors
    /// As [`BatchPlan::from_global`], and [`BatchError::Ramp`].
    pub fn at(sizes: &BatchSizes, consumed: u64, micro: usize, data_parallel: usize) -> Result<Self, BatchError> {
        Self::from_global(sizes.global, micro, data_parallel)?;
        sizes.check(micro * data_parallel)?;
        Self::from_global(sizes.at(consumed), micro, data_parallel)
    }

    /// Rows of the global batch.
    pub fn global(&self) -> usize {
        self.micro * self.accumulation * self.data_parallel
    }

    /// Rows of the global batch that micro-batch `micro_batch` of data-parallel rank `dp_rank` takes: Megatron's
    /// sampler gives each rank a contiguous chunk of every `micro × data_parallel` sequences (data_samplers.py).
    pub fn sequences(&self, micro_batch: usize, dp_rank: usize) -> Range<usize> {
        assert!(
            micro_batch < self.accumulation && dp_rank < self.data_parallel,
            "micro-batch or rank outside {self:?}"
        );
        let start = (micro_batch * self.data_parallel + dp_rank) * self.micro;
        start..start + self.micro
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_error_names_the_nearest_legal_values() {
        let text = BatchPlan::from_global(20, 4, 2).unwrap_err().to_string();
        assert!(text.contains("16 or 24") && text.contains("micro-batch 5"), "{text}");
        let text = BatchPlan::from_global(3, 4, 2).unwrap_err().to_string();
        assert!(text.contains("legal global batch: 8") && !text.contains("keep"), "{text}");
        assert_eq!(BatchPlan::from_global(8, 0, 2), Err(BatchError::Zero { key: "micro-batch" }));
    }

    #[test]
    fn sequences_of_the_oracle_layout() {
        let plan = BatchPlan::from_global(8, 2, 2).unwrap();
        assert_eq!(
            (plan.accumulation, plan.sequences(0, 0), plan.sequences(0, 1), plan.sequences(1, 0)),
            (2, 0..2, 2..4, 4..6)
        );
    }

    proptest! {
        #[test]
        fn every_sequence_is_taken_exactly_once(micro in 1usize..6, accumulation in 1usize..6, dp in 1usize..6) {
            let plan = BatchPlan::from_global(micro * accumulation * dp, micro, dp).unwrap();
            prop_assert_eq!(plan.accumulation, accumulation);
            let mut sequences: Vec<_> = (0..accumulation).flat_map(|m| (0..dp).flat_map(move |d| plan.sequences(m, d))).collect();
            sequences.sort_unstable();
            prop_assert_eq!(sequences, (0..plan.global()).collect::<Vec<_>>());
        }
    }
}
