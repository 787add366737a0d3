//! Weight decay that grows while a run trains (megatron/core/optimizer_param_scheduler.py, `get_wd`).

use super::Span;
use crate::batch::BatchSizes;
use serde::{Deserialize, Serialize};
use std::f64::consts::PI;

/// How the weight decay gets from its start to its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WeightDecayIncr {
    /// It is at its end from the start.
    #[default]
    Constant,
    /// In a straight line.
    Linear,
    /// Along half a cosine.
    Cosine,
}

/// The schedule of the weight decay as the user writes it; it ends at the optimizer's constant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct WeightDecayConfig {
    /// Shape of the schedule.
    pub incr_style: WeightDecayIncr,
    /// Weight decay of the first step. Unused when constant.
    pub start: f64,
    /// Length of the schedule from the start of training. Megatron takes all of the training. `None` when constant.
    pub length: Option<Span>,
}

/// A weight decay that grows from something that it cannot grow from.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum WeightDecayError {
    /// The start is not between 0 and the end.
    #[error(
        "`weight-decay.start` = {start} is not from 0 to `optimizer.weight-decay` = {end}; nearest legal: {nearest}"
    )]
    Start { start: f64, end: f64, nearest: f64 },
    /// There is a form and no length.
    #[error("`weight-decay.length` is needed with an `incr-style` other than constant: 1000, or \"8000 samples\"")]
    Length,
}

/// A weight decay for every number of consumed samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WeightDecaySchedule {
    style: WeightDecayIncr,
    start: f64,
    end: f64,
    samples: u64,
}

impl WeightDecayConfig {
    /// The schedule that ends at `end`, for a run with batches of these sizes.
    ///
    /// # Errors
    /// [`WeightDecayError`] where start and end or length contradict each other.
    pub fn schedule(&self, end: f64, batch: impl Into<BatchSizes>) -> Result<WeightDecaySchedule, WeightDecayError> {
        let &Self { incr_style: style, start, length } = self;
        if style == WeightDecayIncr::Constant {
            return Ok(WeightDecaySchedule { style, start: end, end, samples: 0 });
        }
        if !(0.0..=end).contains(&start) {
            let nearest = if start > end { end.max(0.0) } else { 0.0 };
            return Err(WeightDecayError::Start { start, end, nearest });
        }
        let samples = length.ok_or(WeightDecayError::Length)?.samples(batch);
        Ok(WeightDecaySchedule { style, start, end, samples })
    }
}

impl WeightDecaySchedule {
    /// The weight decay of the step that follows `consumed` samples. The first step has the start.
    pub fn at(&self, consumed: u64) -> f64 {
        if consumed > self.samples || self.samples == 0 {
            return self.end;
        }
        let ratio = consumed as f64 / self.samples as f64;
        let share = match self.style {
            WeightDecayIncr::Constant => return self.end,
            WeightDecayIncr::Linear => ratio,
            WeightDecayIncr::Cosine => 0.5 * ((PI * (1.0 - ratio)).cos() + 1.0),
        };
        self.start + share * (self.end - self.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decays(incr_style: WeightDecayIncr, samples: &[u64]) -> Vec<f64> {
        let config = WeightDecayConfig { incr_style, start: 0.1, length: Some(Span::Steps(10)) };
        let schedule = config.schedule(0.5, 8).unwrap();
        samples.iter().map(|n| (schedule.at(*n) * 1e9).round() / 1e9).collect()
    }

    // Expected values: `get_wd` by hand from 0.1 to 0.5 over 80 samples.
    #[test]
    fn each_style_follows_megatron() {
        let at = [0, 20, 40, 80, 81, 1000];
        assert_eq!(decays(WeightDecayIncr::Constant, &at), [0.5; 6]);
        assert_eq!(decays(WeightDecayIncr::Linear, &at), [0.1, 0.2, 0.3, 0.5, 0.5, 0.5]);
        assert_eq!(decays(WeightDecayIncr::Cosine, &at), [0.1, 0.158578644, 0.3, 0.5, 0.5, 0.5]);
        let samples = WeightDecayConfig { length: Some(Span::Samples(80)), ..config() };
        assert_eq!(samples.schedule(0.5, 3).unwrap().at(20), config().schedule(0.5, 8).unwrap().at(20));
    }

    fn config() -> WeightDecayConfig {
        WeightDecayConfig { incr_style: WeightDecayIncr::Linear, start: 0.1, length: Some(Span::Steps(10)) }
    }

    #[test]
    fn contradictions_are_refused() {
        let refuse = |start, end| WeightDecayConfig { start, ..config() }.schedule(end, 1).unwrap_err().to_string();
        assert!(
            refuse(0.2, 0.1).ends_with("`optimizer.weight-decay` = 0.1; nearest legal: 0.1"),
            "{}",
            refuse(0.2, 0.1)
        );
        assert!(refuse(-0.2, 0.1).ends_with("nearest legal: 0"));
        let endless = WeightDecayConfig { length: None, ..config() };
        assert_eq!(endless.schedule(0.5, 1), Err(WeightDecayError::Length));
        assert_eq!(WeightDecayConfig::default().schedule(0.3, 1).unwrap().at(0), 0.3);
    }
}
