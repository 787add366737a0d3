//! The dynamic loss scale of fp16 training (megatron/core/optimizer/grad_scaler.py, `DynamicGradScaler`).

use serde::{Deserialize, Serialize};

/// How the loss scale moves. The defaults are Megatron's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct LossScalerConfig {
    /// The first scale.
    pub initial_scale: f64,
    /// No scale is smaller.
    pub min_scale: f64,
    /// Multiplies the scale when it grows.
    pub growth_factor: f64,
    /// Multiplies the scale when it shrinks.
    pub backoff_factor: f64,
    /// Consecutive steps without overflow after which the scale grows.
    pub growth_interval: u32,
    /// Overflows that are needed before the scale shrinks; once they are used up, each further one shrinks it, until it
    /// grows again.
    pub hysteresis: u32,
}

impl Default for LossScalerConfig {
    fn default() -> Self {
        Self {
            initial_scale: 4_294_967_296.0,
            min_scale: 1.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 1000,
            hysteresis: 2,
        }
    }
}

/// What a checkpoint keeps of a [`LossScaler`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScale {
    /// Multiplies the loss.
    pub scale: f64,
    /// Steps without overflow since the last overflow or growth.
    pub clean_steps: u32,
    /// Overflows that are still forgiven, and the one that is not.
    pub hysteresis: u32,
}

/// The factor that keeps small fp16 gradients from vanishing. A step whose gradients overflow is skipped and tells so;
/// all ranks must report the same.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaler {
    config: LossScalerConfig,
    state: LossScale,
}

impl LossScaler {
    /// The scaler before the first step.
    pub fn new(config: LossScalerConfig) -> Self {
        let state = LossScale { scale: config.initial_scale, clean_steps: 0, hysteresis: config.hysteresis };
        Self { config, state }
    }

    /// The scaler as a checkpoint has saved it.
    pub fn with_state(mut self, state: LossScale) -> Self {
        self.state = state;
        self
    }

    /// The factor of the loss; gradients are divided by it.
    pub fn scale(&self) -> f64 {
        self.state.scale
    }

    /// For a checkpoint.
    pub fn state(&self) -> LossScale {
        self.state
    }

    /// Takes note of a step: whether its gradients have overflown.
    pub fn update(&mut self, overflow: bool) {
        let Self { config, state } = self;
        if overflow {
            state.clean_steps = 0;
            state.hysteresis = state.hysteresis.saturating_sub(1);
            if state.hysteresis == 0 {
                state.scale = (state.scale * config.backoff_factor).max(config.min_scale);
            }
        } else {
            state.clean_steps += 1;
            if state.clean_steps == config.growth_interval {
                state.clean_steps = 0;
                state.hysteresis = config.hysteresis;
                state.scale *= config.growth_factor;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(config: LossScalerConfig, overflows: &[bool]) -> Vec<f64> {
        let mut scaler = LossScaler::new(config);
        let step = |overflow: &bool| {
            scaler.update(*overflow);
            scaler.scale()
        };
        overflows.iter().map(step).collect()
    }

    #[test]
    fn shrinks_once_the_hysteresis_is_used_up_and_down_to_the_minimum() {
        let config = LossScalerConfig { initial_scale: 8.0, min_scale: 1.5, ..Default::default() };
        assert_eq!(run(config, &[true; 5]), [8.0, 4.0, 2.0, 1.5, 1.5]);
        // Clean steps do not forgive: only growth does.
        assert_eq!(run(config, &[true, false, true, false, true]), [8.0, 8.0, 4.0, 4.0, 2.0]);
    }

    #[test]
    fn grows_after_consecutive_clean_steps_and_forgives_then() {
        let config = LossScalerConfig { initial_scale: 8.0, growth_interval: 3, ..Default::default() };
        let steps = [false, false, true, false, false, false, true, true];
        assert_eq!(run(config, &steps), [8.0, 8.0, 8.0, 8.0, 8.0, 16.0, 16.0, 8.0]);
    }

    #[test]
    fn defaults_are_megatrons() {
        let clean = run(LossScalerConfig::default(), &[false; 1000]);
        assert_eq!((clean[998], clean[999]), (2f64.powi(32), 2f64.powi(33)));
    }

    #[test]
    fn goes_on_from_a_checkpoint() {
        let config = LossScalerConfig { growth_interval: 2, ..Default::default() };
        let mut scaler = LossScaler::new(config);
        [true, true, true, false].into_iter().for_each(|overflow| scaler.update(overflow));
        let saved = serde_json::to_string(&scaler.state()).unwrap();
        let mut resumed = LossScaler::new(config).with_state(serde_json::from_str(&saved).unwrap());
        assert_eq!(resumed, scaler);
        [false, true].into_iter().for_each(|overflow| {
            scaler.update(overflow);
            resumed.update(overflow);
            assert_eq!(resumed, scaler);
        });
    }
}
