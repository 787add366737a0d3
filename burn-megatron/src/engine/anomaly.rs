//! Steps whose loss or gradient norm is not finite, or far above those before, and what is done about them.

use std::collections::VecDeque;
use std::fmt;

use serde::{Deserialize, Serialize};

/// What a run does about a bad step.
///
/// ```
/// use burn_megatron::prelude::*;
///
/// let anomaly = AnomalyConfig { non_finite: AnomalyAction::Skip, ..AnomalyConfig::default() };
/// let recipe = EngineConfig { anomaly, ..EngineConfig::new(2, 16, LrConfig::constant(1e-3)) };
/// assert_eq!(recipe.anomaly.spike, None, "spikes are not looked for");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AnomalyAction {
    /// End with an error; parameters are those of the last finished step.
    #[default]
    Stop,
    /// Leave the step's samples out: everything but the count of steps and samples is as if they had never been read.
    Skip,
    /// Leave them out, and take weights, optimizer and count of steps from a checkpoint: the run continues there with the samples after the bad ones (Chowdhery et al., "PaLM", 2022, section 5.1).
    RollBack,
}

/// Which steps are bad, and what is done about them.
///
/// A spike is what OLMo-core's `SkipStepOptimizer` takes for one (`olmo_core/optim/skip_step_optimizer.py`): a loss or a
/// gradient norm more than `sigma_factor` standard deviations above the mean of the last `window` steps, of which at least
/// half must have been done. Steps that are skipped do not enter the mean, where OLMo-core's do: a run with a skipped step
/// goes the way of a run that never saw its samples.
///
/// ```
/// use burn_megatron::prelude::*;
///
/// let careful = AnomalyConfig { spike: Some(AnomalyAction::RollBack), sigma_factor: 8.0, ..AnomalyConfig::default() };
/// assert_eq!((careful.non_finite, careful.window), (AnomalyAction::Stop, 128));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct AnomalyConfig {
    /// If the loss or the gradient norm is NaN or infinite. Overflows of fp16 gradients are the loss scale's.
    pub non_finite: AnomalyAction,
    /// If one of them is a spike; `None` does not look for spikes.
    pub spike: Option<AnomalyAction>,
    /// Standard deviations above the mean that make a spike.
    pub sigma_factor: f64,
    /// Steps of which the mean is taken.
    pub window: usize,
    /// Skipped steps one after the other, or roll-backs to one checkpoint, after which the run ends with an error.
    pub max_consecutive: usize,
    /// A roll-back goes to the newest checkpoint that is at least so many steps before the bad one: what made a step bad
    /// may have begun before it. 0: the newest checkpoint.
    pub roll_back_steps: u64,
}

impl Default for AnomalyConfig {
    fn default() -> Self {
        Self {
            non_finite: AnomalyAction::Stop,
            spike: None,
            sigma_factor: 6.0,
            window: 128,
            max_consecutive: 16,
            roll_back_steps: 0,
        }
    }
}

impl AnomalyConfig {
    /// Whether losses are needed before the update.
    pub(super) fn is_on(&self) -> bool {
        self.spike.is_some() || self.non_finite != AnomalyAction::Stop
    }

    /// Whether a bad step may take the run back to a checkpoint.
    pub fn rolls_back(&self) -> bool {
        self.non_finite == AnomalyAction::RollBack || self.spike == Some(AnomalyAction::RollBack)
    }

    fn action(&self, anomaly: &Anomaly) -> AnomalyAction {
        match anomaly {
            Anomaly::NonFinite { .. } => self.non_finite,
            Anomaly::Spike { .. } => self.spike.unwrap_or_default(),
        }
    }
}

/// What is wrong with a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Anomaly {
    /// One of the two is NaN or infinite.
    NonFinite {
        /// Mean over the global batch.
        loss: f64,
        /// Global norm before clipping.
        grad_norm: f64,
    },
    /// One of them is far above those of the steps before.
    Spike {
        /// `loss` or `gradient norm`.
        what: &'static str,
        /// This step's.
        value: f64,
        /// Of the steps before.
        mean: f64,
        /// Their standard deviation.
        std: f64,
    },
}

impl fmt::Display for Anomaly {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NonFinite { loss, grad_norm } => write!(f, "loss {loss:.4}, gradient norm {grad_norm:.4}"),
            Self::Spike { what, value, mean, std } => {
                let sigmas = (value - mean) / std;
                write!(
                    f,
                    "{what} {value:.4} is {sigmas:.1} standard deviations above the mean {mean:.4} of the last steps"
                )
            }
        }
    }
}

/// Losses and gradient norms of the last steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct AnomalyWatch {
    losses: VecDeque<f64>,
    norms: VecDeque<f64>,
    consecutive: usize,
}

/// The anomaly watch in a checkpoint, in the bits of `f64`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnomalyState {
    /// Losses of the last steps, the latest last.
    pub losses: Vec<u64>,
    /// Their gradient norms.
    pub norms: Vec<u64>,
    /// Steps that have been skipped since.
    pub consecutive: usize,
}

impl AnomalyWatch {
    /// What is wrong with a step, and what to do; a step that is to be skipped once too often is to stop the run. A step
    /// without anomaly is remembered.
    pub fn judge(&mut self, config: &AnomalyConfig, loss: f64, grad_norm: f64) -> Option<(Anomaly, AnomalyAction)> {
        let spike = |what, value, before| config.spike.and_then(|_| spike(config, what, value, before));
        let found = match loss.is_finite() && grad_norm.is_finite() {
            false => Some(Anomaly::NonFinite { loss, grad_norm }),
            true => spike("loss", loss, &self.losses).or_else(|| spike("gradient norm", grad_norm, &self.norms)),
        };
        let Some(anomaly) = found else {
            self.consecutive = 0;
            for (window, value) in [(&mut self.losses, loss), (&mut self.norms, grad_norm)] {
                window.push_back(value);
                window.drain(..window.len().saturating_sub(config.window));
            }
            return None;
        };
        self.consecutive += 1;
        let too_often = self.consecutive > config.max_consecutive;
        Some((anomaly, if too_often { AnomalyAction::Stop } else { config.action(&anomaly) }))
    }

    pub fn state(&self) -> AnomalyState {
        let bits = |values: &VecDeque<f64>| values.iter().map(|value| value.to_bits()).collect();
        AnomalyState { losses: bits(&self.losses), norms: bits(&self.norms), consecutive: self.consecutive }
    }

    pub fn restored(state: &AnomalyState) -> Self {
        let values = |bits: &[u64]| bits.iter().map(|bits| f64::from_bits(*bits)).collect();
        Self { losses: values(&state.losses), norms: values(&state.norms), consecutive: state.consecutive }
    }
}

fn spike(config: &AnomalyConfig, what: &'static str, value: f64, before: &VecDeque<f64>) -> Option<Anomaly> {
    let count = before.len();
    if count < (config.window / 2).max(2) {
        return None;
    }
    let mean = before.iter().sum::<f64>() / count as f64;
    // Of a sample, as torch.std.
    let variance = before.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1) as f64;
    let std = variance.sqrt();
    (value - mean > config.sigma_factor * std).then_some(Anomaly::Spike { what, value, mean, std })
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: AnomalyConfig = AnomalyConfig {
        non_finite: AnomalyAction::Skip,
        spike: Some(AnomalyAction::Skip),
        sigma_factor: 3.0,
        window: 4,
        max_consecutive: 2,
        roll_back_steps: 0,
    };

    /// Losses 1, 2, 3: mean 2, standard deviation 1.
    fn watch() -> AnomalyWatch {
        let mut watch = AnomalyWatch::default();
        let config = AnomalyConfig { spike: None, ..CONFIG };
        (1..=3).for_each(|loss| assert_eq!(watch.judge(&config, f64::from(loss), 1.0 + f64::from(loss)), None));
        watch
    }

    #[test]
    fn a_spike_is_above_so_many_standard_deviations() {
        assert_eq!(watch().judge(&CONFIG, 5.0, 2.0), None);
        let (anomaly, action) = watch().judge(&CONFIG, 5.1, 2.0).unwrap();
        assert_eq!(action, AnomalyAction::Skip);
        assert_eq!(anomaly, Anomaly::Spike { what: "loss", value: 5.1, mean: 2.0, std: 1.0 });
        let text = "loss 5.1000 is 3.1 standard deviations above the mean 2.0000 of the last steps";
        assert_eq!(anomaly.to_string(), text);
        let (anomaly, _) = watch().judge(&CONFIG, 2.0, 9.0).unwrap();
        assert_eq!(anomaly, Anomaly::Spike { what: "gradient norm", value: 9.0, mean: 3.0, std: 1.0 });
        assert_eq!(watch().judge(&AnomalyConfig { spike: None, ..CONFIG }, 50.0, 9.0), None);
        // A fall is none, and with less than half of the window nothing is.
        assert_eq!(watch().judge(&CONFIG, -50.0, 2.0), None);
        assert_eq!(watch().judge(&AnomalyConfig { window: 8, ..CONFIG }, 50.0, 2.0), None);
    }

    #[test]
    fn what_is_skipped_is_not_remembered_and_ends_the_run_once_too_often() {
        let mut watch = watch();
        let before = watch.clone();
        for _ in 0..2 {
            assert_eq!(watch.judge(&CONFIG, f64::NAN, 1.0).unwrap().1, AnomalyAction::Skip);
        }
        assert_eq!((&watch.losses, &watch.norms), (&before.losses, &before.norms));
        assert_eq!(watch.clone().judge(&CONFIG, 60.0, 1.0).unwrap().1, AnomalyAction::Stop);
        assert_eq!(watch.judge(&CONFIG, 2.0, 2.0), None);
        assert_eq!(watch.judge(&CONFIG, 2.0, f64::INFINITY).unwrap().1, AnomalyAction::Skip, "counted anew");
    }

    #[test]
    fn the_window_is_as_long_as_it_is_and_a_checkpoint_has_its_bits() {
        let mut watch = watch();
        watch.judge(&CONFIG, 2.1, 2.1);
        watch.judge(&CONFIG, 2.2, 2.2);
        assert_eq!(Vec::from(watch.losses.clone()), [2.0, 3.0, 2.1, 2.2]);
        let text = serde_json::to_string(&watch.state()).unwrap();
        assert_eq!(AnomalyWatch::restored(&serde_json::from_str(&text).unwrap()), watch);
    }
}
