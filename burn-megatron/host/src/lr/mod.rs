//! Schedules of the learning rate and the weight decay with Megatron's formulas
//! (megatron/core/optimizer_param_scheduler.py).
//!
//! The unit inside is *samples*: a schedule advances with the sequences that successful steps consumed, so it does not change
//! when the batch size does. Lengths may be given in steps; they are turned into samples once, with the sizes of the batches.

mod span;
mod weight_decay;

pub use span::Span;
pub use weight_decay::{WeightDecayConfig, WeightDecayError, WeightDecayIncr, WeightDecaySchedule};

use crate::batch::BatchSizes;
use serde::{Deserialize, Serialize};
use std::f64::consts::PI;

/// Form of the last part of a warm-up-stable-decay schedule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WsdDecay {
    /// `1 − r`
    Linear,
    /// `(cos πr + 1) / 2`
    Cosine,
    /// `2 · ½ʳ − 1`, Megatron's default
    #[default]
    Exponential,
    /// `1 − √r`
    MinusSqrt,
}

/// Form of a schedule after its warm-up.
///
/// ```
/// use host::lr::{LrConfig, LrDecay, Span, WsdDecay};
///
/// // Warm up over 100 steps, stay at the maximum, fall over the last 200 of 2000 steps.
/// let form = LrDecay::Wsd { tail: Span::Steps(200), form: WsdDecay::MinusSqrt };
/// let lr = LrConfig { form, warmup: Span::Steps(100), decay: Span::Steps(2000), ..LrConfig::constant(1e-3) };
/// let schedule = lr.schedule(16)?;
/// assert_eq!(schedule.at(16 * 1800), 1e-3);
/// assert_eq!(schedule.at(16 * 2000), 0.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LrDecay {
    /// Stays at the maximum.
    Constant,
    /// Falls in a straight line to the minimum.
    Linear,
    /// Falls along half a cosine to the minimum.
    Cosine,
    /// `max · √warmup / √samples`, at least the minimum.
    InverseSquareRoot,
    /// Stays at the maximum, then falls over the last `tail` of the decay length.
    Wsd {
        /// Length of the falling part.
        tail: Span,
        /// Its form.
        form: WsdDecay,
    },
}

/// What the user writes down about the learning rate.
///
/// ```
/// use host::lr::{LrConfig, LrDecay, Span};
///
/// let lr = LrConfig {
///     max: 3e-4,
///     min: 3e-5,
///     init: 0.0,
///     warmup: Span::Steps(100),
///     decay: Span::Steps(2000),
///     form: LrDecay::Cosine,
/// };
/// // Schedules count sequences. One step of this run consumes 16 of them.
/// let schedule = lr.schedule(16)?;
/// assert_eq!(schedule.at(16 * 50), 1.5e-4, "half of the warm-up");
/// assert_eq!(schedule.at(16 * 100), 3e-4);
/// assert_eq!(schedule.at(16 * 5000), 3e-5, "after the end of the decay");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct LrConfig {
    /// Learning rate at the end of the warm-up.
    pub max: f64,
    /// Learning rate at and after the end of the decay.
    #[serde(default)]
    pub min: f64,
    /// Learning rate before the first warm-up step.
    #[serde(default)]
    pub init: f64,
    /// Length of the linear warm-up.
    #[serde(default = "no_warmup")]
    pub warmup: Span,
    /// Length from the start of training, warm-up included, after which the rate is `min`. Unused when constant.
    pub decay: Span,
    /// Form after the warm-up.
    pub form: LrDecay,
}

fn no_warmup() -> Span {
    Span::Steps(0)
}

/// A learning-rate configuration that is not valid.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum LrError {
    /// A length is neither a number of steps nor of samples.
    #[error("'{text}' is no length of training: write `100`, `100 steps` or `6400 samples`")]
    Span { text: String },
    /// The three rates are not ordered `0 <= min <= max` and `0 <= init <= max`, or not finite.
    #[error("learning rates need 0 <= min <= max and 0 <= init <= max, they are max {max}, min {min}, init {init}")]
    Order { max: f64, min: f64, init: f64 },
    /// There is no decay.
    #[error("`lr.decay` has a length of {decay}; nearest legal: 1, or lr.form = constant")]
    Decay { decay: Span },
    /// The warm-up is not shorter than the decay.
    #[error(
        "`lr.warmup` ({warmup}) must be shorter than `lr.decay` ({decay}; by default the length of the run); nearest legal: \
         {nearest}"
    )]
    Warmup { warmup: Span, decay: Span, nearest: Span },
    /// The tail of a warm-up-stable-decay schedule is empty or starts inside the warm-up.
    #[error(
        "`lr.form.wsd.tail` ({tail} samples) must be between 1 and {longest} samples (`lr.decay` less `lr.warmup`)"
    )]
    Tail { tail: u64, longest: u64 },
}

impl LrConfig {
    /// A rate that never changes.
    pub fn constant(rate: f64) -> Self {
        let (warmup, decay) = (no_warmup(), Span::Steps(1));
        Self { max: rate, min: 0.0, init: 0.0, warmup, decay, form: LrDecay::Constant }
    }

    /// The schedule in samples, for a run with batches of these sizes.
    ///
    /// # Errors
    /// [`LrError`] where rates or lengths contradict each other.
    pub fn schedule(&self, batch: impl Into<BatchSizes>) -> Result<LrSchedule, LrError> {
        let &Self { max, min, init, .. } = self;
        let ordered = (0.0..=max).contains(&min) && (0.0..=max).contains(&init) && max.is_finite();
        if !ordered {
            return Err(LrError::Order { max, min, init });
        }
        let batch = batch.into();
        let (warmup, decay) = (self.warmup.samples(batch), self.decay.samples(batch));
        if decay == 0 && self.form != LrDecay::Constant {
            return Err(LrError::Decay { decay: self.decay });
        }
        if warmup >= decay && self.form != LrDecay::Constant {
            let nearest = self.warmup.longest_below(decay, batch);
            return Err(LrError::Warmup { warmup: self.warmup, decay: self.decay, nearest });
        }
        let mut tail = 0;
        if let LrDecay::Wsd { tail: span, .. } = self.form {
            tail = span.samples(batch);
            if tail == 0 || tail > decay - warmup {
                return Err(LrError::Tail { tail, longest: decay - warmup });
            }
        }
        Ok(LrSchedule { max, min, init, warmup, decay, tail, form: self.form })
    }
}

/// A learning rate for every number of consumed samples.
#[derive(Clone, Debug, PartialEq)]
pub struct LrSchedule {
    max: f64,
    min: f64,
    init: f64,
    warmup: u64,
    decay: u64,
    tail: u64,
    form: LrDecay,
}

impl LrSchedule {
    /// The rate of the step that follows `consumed` samples (`get_lr`). The first step of a warm-up therefore runs at
    /// the initial rate.
    pub fn at(&self, consumed: u64) -> f64 {
        let (n, warmup) = (consumed as f64, self.warmup as f64);
        if self.warmup > 0 && consumed <= self.warmup {
            return self.init + (self.max - self.init) * n / warmup;
        }
        if self.form == LrDecay::Constant {
            return self.max;
        }
        if consumed > self.decay {
            return self.min;
        }
        let ratio = (n - warmup) / (self.decay as f64 - warmup);
        let fraction = match self.form {
            LrDecay::Constant => 1.0,
            LrDecay::InverseSquareRoot => {
                return (self.max * warmup.max(1.0).sqrt() / n.max(1.0).sqrt()).max(self.min);
            }
            LrDecay::Linear => 1.0 - ratio,
            LrDecay::Cosine => 0.5 * ((PI * ratio).cos() + 1.0),
            LrDecay::Wsd { form, .. } => self.tail_fraction(consumed, form),
        };
        self.min + fraction * (self.max - self.min)
    }

    fn tail_fraction(&self, consumed: u64, form: WsdDecay) -> f64 {
        let start = self.decay - self.tail;
        if consumed <= start {
            return 1.0;
        }
        let ratio = (consumed - start) as f64 / self.tail as f64;
        match form {
            WsdDecay::Linear => 1.0 - ratio,
            WsdDecay::Cosine => 0.5 * ((PI * ratio).cos() + 1.0),
            WsdDecay::Exponential => 2.0 * 0.5f64.powf(ratio) - 1.0,
            WsdDecay::MinusSqrt => 1.0 - ratio.sqrt(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(form: LrDecay) -> LrConfig {
        LrConfig { max: 1.0, min: 0.2, init: 0.0, warmup: Span::Steps(2), decay: Span::Steps(10), form }
    }

    fn rates(form: LrDecay, samples: &[u64]) -> Vec<f64> {
        let schedule = config(form).schedule(10).unwrap();
        samples.iter().map(|n| (schedule.at(*n) * 1e6).round() / 1e6).collect()
    }

    #[test]
    fn warm_up_rises_linearly_from_the_initial_rate_in_steps_or_samples() {
        assert_eq!(rates(LrDecay::Constant, &[0, 5, 10, 20, 1000]), [0.0, 0.25, 0.5, 1.0, 1.0]);
        let samples = LrConfig { warmup: Span::Samples(20), decay: Span::Samples(100), ..config(LrDecay::Cosine) };
        assert_eq!(samples.schedule(10), config(LrDecay::Cosine).schedule(10));
        assert_eq!(LrConfig::constant(0.01).schedule(8).unwrap().at(0), 0.01);
    }

    // Expected values: the formulas of optimizer_param_scheduler.py by hand at warm-up 20, decay 100 samples.
    #[test]
    fn each_form_follows_megatron() {
        let at = [20, 60, 100, 101];
        assert_eq!(rates(LrDecay::Linear, &at), [1.0, 0.6, 0.2, 0.2]);
        assert_eq!(rates(LrDecay::Cosine, &at), [1.0, 0.6, 0.2, 0.2]);
        assert_eq!(rates(LrDecay::Cosine, &[40]), [0.882843]);
        assert_eq!(rates(LrDecay::InverseSquareRoot, &[20, 80, 100, 101]), [1.0, 0.5, 0.447214, 0.2]);
        let wsd = |form| rates(LrDecay::Wsd { tail: Span::Steps(4), form }, &[20, 60, 70, 80, 100, 101]);
        assert_eq!(wsd(WsdDecay::Linear), [1.0, 1.0, 0.8, 0.6, 0.2, 0.2]);
        assert_eq!(wsd(WsdDecay::Cosine), [1.0, 1.0, 0.882843, 0.6, 0.2, 0.2]);
        assert_eq!(wsd(WsdDecay::Exponential), [1.0, 1.0, 0.745434, 0.531371, 0.2, 0.2]);
        assert_eq!(wsd(WsdDecay::MinusSqrt), [1.0, 1.0, 0.6, 0.434315, 0.2, 0.2]);
    }

    #[test]
    fn contradictions_are_refused() {
        let bad = LrConfig { min: 2.0, ..config(LrDecay::Linear) };
        assert!(matches!(bad.schedule(1), Err(LrError::Order { .. })));
        let bad = LrConfig { max: f64::NAN, ..config(LrDecay::Linear) };
        assert!(matches!(bad.schedule(1), Err(LrError::Order { .. })));
        let bad = LrConfig { warmup: Span::Steps(10), ..config(LrDecay::Linear) };
        let said = |warmup, batch: usize| LrConfig { warmup, ..bad.clone() }.schedule(batch).unwrap_err().to_string();
        assert_eq!(
            said(Span::Steps(100), 12),
            "`lr.warmup` (100 steps) must be shorter than `lr.decay` (10 steps; by default the length of the run); nearest \
             legal: 9 steps"
        );
        assert!(said(Span::Samples(120), 12).ends_with("nearest legal: 119 samples"));
        let bad = LrConfig { warmup: Span::Steps(0), decay: Span::Steps(0), ..config(LrDecay::Cosine) };
        assert_eq!(bad.schedule(1), Err(LrError::Decay { decay: Span::Steps(0) }));
        let bad = config(LrDecay::Wsd { tail: Span::Steps(9), form: WsdDecay::Linear });
        assert_eq!(bad.schedule(1), Err(LrError::Tail { tail: 9, longest: 8 }));
    }
}
