//! What counts as equal, by precision.

use backend_dist::shard::Unit;
use burn::tensor::FloatDType;
use std::fmt;

/// Largest relative difference that rounding alone can explain in double precision on models of this size.
pub const TOLERANCE: f64 = 1e-10;

/// The same in single precision, relative to a tensor's norm.
const SINGLE: f64 = 1e-5;

/// Spacing of bf16 numbers at 1 (`torch.finfo(torch.bfloat16).eps`).
const BF16_EPSILON: f64 = 1.0 / 128.0;

/// How a tensor's difference is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// `max |a − b| / max |b|`
    Largest,
    /// `‖a − b‖ / ‖b‖`
    Norm,
}

/// The largest differences that pass.
///
/// | | loss, gradient norm | gradients | parameters |
/// |---|---|---|---|
/// | f64 | 1e-10 | 1e-10 of the largest element | 1e-10 of the largest element |
/// | f32 | 1e-5 | 1e-5 of the norm | 1e-5 of the norm |
/// | bf16 | 4 ε | 4 · 1.03^(L + 1 − l) · ε of the norm, layer l of L | ε / 2 of the norm and twice the gradient's bound of the update's norm |
///
/// The bound for bf16, ε = 2^-7, is that of Megatron's own gradient test
/// (tests/functional_tests/python_test_utils/test_optimizer_grads_match.py, `expected_rel_bound`), from theorem 5.3 of
/// arXiv 2506.09280: errors grow by a factor close to 1 with every layer between a weight and the loss. Embeddings have
/// the bound of the first layer, the head that of the last. A stored weight is rounded by ε / 2 at most; AdamW with a
/// large epsilon follows its gradient. For MoE models it holds where tokens use the same experts
/// ([`RoutingReplay`](models::layers::moe::RoutingReplay)): one token in a hundred with others makes a gradient differ
/// by more.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// How tensors are compared.
    pub measure: Measure,
    /// Relative, of losses and gradient norms.
    pub loss: f64,
    /// Relative, of gradients next to the loss.
    gradients: f64,
    /// By which the bound of gradients grows with a layer.
    growth: f64,
    layers: usize,
    /// Relative, of parameters.
    rounding: f64,
    /// Of parameters, in gradient bounds relative to the update.
    follows: f64,
}

impl Bounds {
    /// For a model of `layers` layers; `tolerance` in place of 1e-10, 1e-5 or 4 ε. Panics if `dtype` is neither `f64`,
    /// `f32` nor `bf16`.
    pub fn new(dtype: FloatDType, tolerance: Option<f64>, layers: usize) -> Self {
        let uniform = |measure, bound| Self {
            measure,
            loss: bound,
            gradients: bound,
            growth: 1.0,
            layers,
            rounding: bound,
            follows: 0.0,
        };
        match dtype {
            FloatDType::F64 => uniform(Measure::Largest, tolerance.unwrap_or(TOLERANCE)),
            FloatDType::F32 => uniform(Measure::Norm, tolerance.unwrap_or(SINGLE)),
            FloatDType::BF16 => Self {
                growth: 1.03,
                rounding: BF16_EPSILON / 2.0,
                follows: 2.0,
                ..uniform(Measure::Norm, tolerance.unwrap_or(4.0 * BF16_EPSILON))
            },
            other => panic!("there is no bound for {other:?}"),
        }
    }

    /// Of the gradient of a parameter that is used in `unit`.
    pub fn gradient(&self, unit: Unit) -> f64 {
        let layer = match unit {
            Unit::Tied | Unit::Embedding => 1,
            Unit::Layer(index) | Unit::Experts(index) => index + 1,
            Unit::Head => self.layers,
        };
        self.gradients * self.growth.powi((self.layers + 1).saturating_sub(layer) as i32)
    }

    /// Of a parameter that is used in `unit`, relative to its size, after updates of `update` times its size.
    pub fn parameter(&self, unit: Unit, update: f64) -> f64 {
        self.rounding + self.follows * self.gradient(unit) * update
    }
}

/// For example `1e-10` or `3.1e-2 x 1.03^(L + 1 - l) in layer l of L`.
impl fmt::Display for Bounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.growth == 1.0 {
            true => write!(f, "{:.0e}", self.gradients),
            false => write!(f, "{:.1e} x {}^(L + 1 - l) in layer l of L", self.gradients, self.growth),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_of_bf16_grows_with_the_distance_to_the_loss() {
        let bounds = Bounds::new(FloatDType::BF16, None, 32);
        let close = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-12, "{a} {b}");
        // expected_rel_bound(l=1, L=32) and (l=32, L=32) of Megatron's test.
        close(bounds.gradient(Unit::Layer(0)), 4.0 * 1.03f64.powi(32) * 0.0078125);
        close(bounds.gradient(Unit::Layer(31)), 4.0 * 1.03 * 0.0078125);
        assert_eq!(bounds.gradient(Unit::Embedding), bounds.gradient(Unit::Layer(0)));
        assert_eq!(bounds.gradient(Unit::Head), bounds.gradient(Unit::Layer(31)));
        close(bounds.parameter(Unit::Head, 0.5), 0.0078125 / 2.0 + bounds.gradient(Unit::Head));
        let single = Bounds::new(FloatDType::F32, None, 32);
        assert_eq!([single.gradient(Unit::Layer(0)), single.parameter(Unit::Head, 0.5)], [1e-5, 1e-5]);
    }
}
