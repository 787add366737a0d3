//! Lion: steps of one size, whose sign an interpolated momentum decides (Chen et al.: "Symbolic Discovery of
//! Optimization Algorithms", algorithm 2).

use super::real::Real;
use super::sgd::Step;
use serde::{Deserialize, Serialize};

/// Constants of Lion; the defaults are Megatron's. It wants a learning rate of a third to a tenth of AdamW's, and a
/// weight decay as many times larger.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct LionConfig {
    /// Share of the momentum in the sign that is stepped along.
    pub beta1: f64,
    /// Decay of the momentum.
    pub beta2: f64,
    /// Share of a decayed parameter that is removed per step, times the learning rate.
    pub weight_decay: f64,
    /// Decay one-dimensional parameters too.
    pub decay_vectors: bool,
}

impl Default for LionConfig {
    fn default() -> Self {
        Self { beta1: 0.95, beta2: 0.98, weight_decay: 0.01, decay_vectors: false }
    }
}

/// One step over one parameter, in place. Panics if the slices differ in length.
pub fn update<E: Real>(param: &mut [E], grad: &[E], momentum: &mut [E], decays: bool, k: &Step<LionConfig>) {
    let n = param.len();
    assert!(grad.len() == n && momentum.len() == n, "parameter, gradient and momentum differ in length");
    let keep = E::of(if decays { 1.0 - k.lr * k.config.weight_decay } else { 1.0 });
    let (lr, scale) = (E::of(k.lr), E::of(k.grad_scale));
    let (beta1, rest1) = (E::of(k.config.beta1), E::of(1.0 - k.config.beta1));
    let (beta2, rest2) = (E::of(k.config.beta2), E::of(1.0 - k.config.beta2));
    for ((p, g), m) in param.iter_mut().zip(grad).zip(momentum) {
        let g = *g * scale;
        *p = *p * keep - lr * sign(beta1 * *m + rest1 * g);
        *m = beta2 * *m + rest2 * g;
    }
}

/// −1, 0 or 1; NaN stays NaN.
fn sign<E: Real>(x: E) -> E {
    let zero = E::of(0.0);
    if x > zero {
        E::of(1.0)
    } else if x < zero {
        E::of(-1.0)
    } else {
        x
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Two steps of the paper's algorithm by hand: the momentum of the first outweighs the gradient of the second.
    #[test]
    fn follows_the_paper() {
        let config = LionConfig { beta1: 0.9, beta2: 0.5, weight_decay: 0.5, ..LionConfig::default() };
        let k = Step { lr: 0.1, grad_scale: 0.5, config };
        let (mut p, mut m) = ([1.0f64, -2.0, 3.0], [0.0; 3]);
        update(&mut p, &[8.0, -2.0, 0.0], &mut m, true, &k);
        assert_eq!(m, [2.0, -0.5, 0.0]);
        assert_eq!(p, [0.95 - 0.1, -1.9 + 0.1, 3.0 * 0.95]);
        let before = p;
        update(&mut p, &[-2.0, 0.0, -0.2], &mut m, false, &k);
        assert_eq!(p, [before[0] - 0.1, before[1] + 0.1, before[2] + 0.1]);
        assert_eq!(m, [0.5, -0.25, -0.05]);
    }

    #[test]
    fn not_a_number_is_not_hidden() {
        let (mut p, mut m) = ([1.0f32], [0.0]);
        update(&mut p, &[f32::NAN], &mut m, false, &Step { lr: 0.1, grad_scale: 1.0, config: LionConfig::default() });
        assert!(p[0].is_nan());
    }
}
