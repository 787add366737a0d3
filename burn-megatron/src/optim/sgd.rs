//! Stochastic gradient descent with momentum, as `torch.optim.SGD` without dampening, and decoupled weight decay.

use super::real::Real;
use serde::{Deserialize, Serialize};

/// Constants of SGD. Weight decay shrinks the weights themselves, as AdamW does it: the momentum does not see it
/// (Loshchilov, Hutter: "Decoupled Weight Decay Regularization", algorithm 1).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct SgdConfig {
    /// Share of the running sum of gradients that remains per step (Megatron's `--sgd-momentum`); 0 has no momentum buffer.
    pub momentum: f64,
    /// Looks one step ahead: the step is the gradient plus `momentum` times the new sum.
    pub nesterov: bool,
    /// Share of a decayed parameter that is removed per step, times the learning rate.
    pub weight_decay: f64,
    /// Decay one-dimensional parameters too.
    pub decay_vectors: bool,
}

impl Default for SgdConfig {
    fn default() -> Self {
        Self { momentum: 0.9, nesterov: false, weight_decay: 0.01, decay_vectors: false }
    }
}

/// What one step of SGD or Lion needs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step<Config> {
    /// The learning rate.
    pub lr: f64,
    /// Multiplies the gradient.
    pub grad_scale: f64,
    /// The configuration.
    pub config: Config,
}

/// One step over one parameter, in place. Without momentum `sum` is not touched and may be empty. Panics if the slices
/// differ in length.
pub fn update<E: Real>(param: &mut [E], grad: &[E], sum: &mut [E], decays: bool, k: &Step<SgdConfig>) {
    assert_eq!(param.len(), grad.len(), "parameter and gradient differ in length");
    let keep = E::of(if decays { 1.0 - k.lr * k.config.weight_decay } else { 1.0 });
    let (lr, scale, momentum) = (E::of(k.lr), E::of(k.grad_scale), E::of(k.config.momentum));
    if k.config.momentum == 0.0 {
        param.iter_mut().zip(grad).for_each(|(p, g)| *p = *p * keep - lr * (*g * scale));
        return;
    }
    assert_eq!(param.len(), sum.len(), "parameter and momentum differ in length");
    for ((p, g), m) in param.iter_mut().zip(grad).zip(sum) {
        let g = *g * scale;
        *m = momentum * *m + g;
        let step = if k.config.nesterov { g + momentum * *m } else { *m };
        *p = *p * keep - lr * step;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_steps(config: SgdConfig, decays: bool) -> f64 {
        let (mut p, mut m) = ([1.0f64], [0.0]);
        for grad in [0.5, -0.25] {
            let sum = if config.momentum == 0.0 { &mut m[..0] } else { &mut m[..] };
            update(&mut p, &[grad / 4.0], sum, decays, &Step { lr: 0.1, grad_scale: 4.0, config });
        }
        p[0]
    }

    // torch.optim.SGD's documentation, written out for two steps.
    #[test]
    fn follows_torch() {
        let config = SgdConfig { weight_decay: 0.0, ..SgdConfig::default() };
        assert!((two_steps(config, true) - (1.0 - 0.1 * 0.5 - 0.1 * (0.9 * 0.5 - 0.25))).abs() < 1e-15);
        let (first, second) = (0.5 + 0.9 * 0.5, -0.25 + 0.9 * (0.9 * 0.5 - 0.25));
        let nesterov = SgdConfig { nesterov: true, ..config };
        assert!((two_steps(nesterov, true) - (1.0 - 0.1 * first - 0.1 * second)).abs() < 1e-15);
        let plain = SgdConfig { momentum: 0.0, ..config };
        assert!((two_steps(plain, true) - (1.0 - 0.05 + 0.025)).abs() < 1e-15);
    }

    #[test]
    fn decay_is_decoupled_from_the_momentum() {
        let config = SgdConfig { weight_decay: 0.5, ..SgdConfig::default() };
        let expected = ((1.0 * 0.95 - 0.05) * 0.95) - 0.1 * (0.9 * 0.5 - 0.25);
        assert!((two_steps(config, true) - expected).abs() < 1e-15);
        assert_eq!(two_steps(config, false), two_steps(SgdConfig { weight_decay: 0.0, ..config }, true));
    }
}
