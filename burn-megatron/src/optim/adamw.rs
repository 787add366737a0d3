//! AdamW with decoupled weight decay, as `torch.optim.AdamW` and Megatron's fused Adam compute it.

use super::real::Real;
use super::states::{MainParamsDtype, StateDtype};
use serde::{Deserialize, Serialize};

/// Constants of AdamW; the learning rate comes from a schedule. The defaults are Megatron's, with weight decay 0.01
/// (megatron/core/optimizer/optimizer_config.py).
///
/// ```
/// use burn_megatron::prelude::*;
///
/// // The usual constants of large language models.
/// let adamw = AdamWConfig { beta2: 0.95, weight_decay: 0.1, ..AdamWConfig::default() };
/// let recipe = EngineConfig::new(2, 16, LrConfig::constant(3e-4));
/// let recipe = EngineConfig { optimizer: adamw.into(), clip: Some(1.0), ..recipe };
/// assert_eq!(recipe.optimizer.weight_decay(), 0.1);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct AdamWConfig {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment after bias correction.
    pub eps: f64,
    /// Share of a decayed parameter that is removed per step, times the learning rate.
    pub weight_decay: f64,
    /// Decay one-dimensional parameters too: norm weights and biases. Megatron's rule
    /// (`get_standard_config_overrides` in megatron/core/optimizer/__init__.py) does not.
    pub decay_vectors: bool,
    /// Type of the first moment (Megatron's `--exp-avg-dtype`).
    pub exp_avg_dtype: StateDtype,
    /// Type of the second moment (Megatron's `--exp-avg-sq-dtype`).
    pub exp_avg_sq_dtype: StateDtype,
    /// Type of the main gradients of `bf16` weights (Megatron's `--main-grads-dtype`): in which those of micro-batches and
    /// data-parallel ranks are added up.
    pub main_grads_dtype: StateDtype,
    /// How master weights of `bf16` weights are kept.
    pub main_params_dtype: MainParamsDtype,
    /// Keep states in host memory (Megatron-LM's `--optimizer-cpu-offload`): moments, and master weights of narrower
    /// weights. A step updates them on the GPU in pieces, with the same bits as without.
    pub cpu_offload: bool,
    /// Share of the parameters whose states are there with `cpu_offload` (`--optimizer-offload-fraction`), by whole layers:
    /// more than 0, at most 1.
    pub offload_fraction: f64,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
            decay_vectors: false,
            exp_avg_dtype: StateDtype::F32,
            exp_avg_sq_dtype: StateDtype::F32,
            main_grads_dtype: StateDtype::F32,
            main_params_dtype: MainParamsDtype::F32,
            cpu_offload: false,
            offload_fraction: 1.0,
        }
    }
}

/// What one step needs, with everything that is the same for all elements computed once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Coefficients {
    /// Multiplies the gradient: division by tokens and clipping in one factor.
    pub grad_scale: f64,
    /// `1 − lr · weight_decay`, for decayed parameters.
    pub keep: f64,
    /// `lr / (1 − beta1ᵗ)`
    pub step_size: f64,
    /// `1 / √(1 − beta2ᵗ)`
    pub root_scale: f64,
    /// Number of the update, for the random bits of moments in bf16.
    pub step: u32,
    /// The configuration.
    pub config: AdamWConfig,
}

impl AdamWConfig {
    /// The coefficients of update number `t`, counted from 1.
    pub fn coefficients(&self, lr: f64, t: u64, grad_scale: f64) -> Coefficients {
        assert!(t > 0, "updates are counted from 1");
        let correction = |beta: f64| 1.0 - beta.powf(t as f64);
        Coefficients {
            grad_scale,
            keep: 1.0 - lr * self.weight_decay,
            step_size: lr / correction(self.beta1),
            root_scale: 1.0 / correction(self.beta2).sqrt(),
            step: t as u32,
            config: *self,
        }
    }
}

/// One step over one parameter, in place: a single pass over parameter, gradient and both moments. Panics if the slices
/// differ in length.
pub fn update<E: Real>(param: &mut [E], grad: &[E], first: &mut [E], second: &mut [E], decays: bool, k: &Coefficients) {
    let n = param.len();
    assert!(
        grad.len() == n && first.len() == n && second.len() == n,
        "parameter, gradient and moments differ in length"
    );
    let keep = E::of(if decays { k.keep } else { 1.0 });
    let scale = E::of(k.grad_scale);
    let (beta1, rest1) = (E::of(k.config.beta1), E::of(1.0 - k.config.beta1));
    let (beta2, rest2) = (E::of(k.config.beta2), E::of(1.0 - k.config.beta2));
    let (step, root_scale, eps) = (E::of(k.step_size), E::of(k.root_scale), E::of(k.config.eps));
    for (((p, g), m), v) in param.iter_mut().zip(grad).zip(first).zip(second) {
        let g = *g * scale;
        *m = beta1 * *m + rest1 * g;
        *v = beta2 * *v + rest2 * (g * g);
        *p = *p * keep - step * *m / (v.sqrt() * root_scale + eps);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // The formulas of torch.optim.AdamW written out: the first step moves each parameter by lr against the sign of its
    // gradient, after the decay by 1 - lr * 0.1; the second is checked against the moments in closed form.
    #[test]
    fn follows_torch() {
        let config = AdamWConfig { beta1: 0.9, beta2: 0.95, weight_decay: 0.1, ..AdamWConfig::default() };
        let (mut p, mut m, mut v) = ([1.0f64, -2.0], [0.0; 2], [0.0; 2]);
        update(&mut p, &[0.5, -0.1], &mut m, &mut v, true, &config.coefficients(0.01, 1, 1.0));
        assert!((p[0] - (0.999 - 0.01)).abs() < 1e-9 && (p[1] - (-1.998 + 0.01)).abs() < 1e-9, "{p:?}");
        update(&mut p, &[-0.25, 0.4], &mut m, &mut v, true, &config.coefficients(0.01, 2, 1.0));
        let expected = |p1: f64, g1: f64, g2: f64| {
            let m = (0.9 * 0.1 * g1 + 0.1 * g2) / (1.0 - 0.81);
            let v = (0.95 * 0.05 * g1 * g1 + 0.05 * g2 * g2) / (1.0 - 0.9025);
            p1 * 0.999 - 0.01 * m / (v.sqrt() + 1e-8)
        };
        assert!((p[0] - expected(0.989, 0.5, -0.25)).abs() < 1e-9, "{p:?}");
        assert!((p[1] - expected(-1.988, -0.1, 0.4)).abs() < 1e-9, "{p:?}");
    }

    #[test]
    fn undecayed_parameters_only_follow_the_gradient() {
        let config = AdamWConfig { weight_decay: 0.5, ..AdamWConfig::default() };
        let (mut p, mut m, mut v) = ([3.0f32], [0.0f32], [0.0f32]);
        update(&mut p, &[0.0], &mut m, &mut v, false, &config.coefficients(0.1, 1, 1.0));
        assert_eq!(p, [3.0]);
        update(&mut p, &[0.0], &mut m, &mut v, true, &config.coefficients(0.1, 2, 1.0));
        assert!((p[0] - 2.85).abs() < 1e-6);
    }

    #[test]
    fn the_gradient_scale_is_the_same_as_scaled_gradients() {
        let config = AdamWConfig::default();
        let run = |grad: f64, scale: f64| {
            let (mut p, mut m, mut v) = ([1.0f64], [0.1], [0.2]);
            update(&mut p, &[grad], &mut m, &mut v, true, &config.coefficients(0.1, 3, scale));
            (p, m, v)
        };
        assert_eq!(run(8.0, 0.25), run(2.0, 1.0));
    }
}
