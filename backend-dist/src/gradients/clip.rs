//! Clipping by the norm of all gradients together.

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, FloatDType, Tensor};
use std::collections::HashSet;

use ranks::comm::Group;

/// What PyTorch's `clip_grad_norm_` multiplies gradients with: `max_norm / (norm + 1e-6)`, at most 1.
fn clip_factor(max_norm: f64, norm: f64) -> f64 {
    let factor = max_norm / (norm + 1e-6);
    if factor < 1.0 || norm.is_nan() { factor } else { 1.0 }
}

/// Clips the gradients of `module` so that the norm of all of them together, over all ranks, is at most `max_norm`, as
/// PyTorch's `clip_grad_norm_` does. Returns the norm too, of before.
///
/// - `counts` says which parameters' gradients this rank counts: those that it alone has, and those that several ranks
///   have on one of them.
/// - The norm is over the ranks of all `groups`, of groups of groups: first within the first, then between them along the
///   second. Every rank of them must call this.
///
/// 16-bit gradients are squared and added up in f32, others in their own type.
pub fn clip_grad_norm<M: Module>(
    module: &M,
    grads: GradientsParams,
    max_norm: f64,
    counts: impl Fn(ParamId) -> bool,
    groups: &[&Group],
) -> (GradientsParams, f64) {
    let own = squared_norm(module, &grads, counts);
    let over = |sum: f64, group: &&Group| group.all_gather_host(sum).into_iter().sum();
    let norm = groups.iter().fold(own, over).sqrt();
    let factor = clip_factor(max_norm, norm);
    if factor == 1.0 {
        return (grads, norm);
    }
    let mut scale = Scale { grads, factor, seen: HashSet::new() };
    module.visit(&mut scale);
    (scale.grads, norm)
}

fn squared_norm<M: Module>(module: &M, grads: &GradientsParams, counts: impl Fn(ParamId) -> bool) -> f64 {
    let mut squares = Squares { grads, counts: &counts, seen: HashSet::new(), sums: Vec::new() };
    module.visit(&mut squares);
    // A read for each number type, which an accelerator is waited for.
    let mut sums = squares.sums;
    let mut total = 0.0;
    while let Some(dtype) = sums.first().map(|sum| sum.dtype()) {
        let (of_type, others): (Vec<_>, Vec<_>) = sums.into_iter().partition(|sum| sum.dtype() == dtype);
        total += Tensor::cat(of_type, 0).into_data().iter::<f64>().sum::<f64>();
        sums = others;
    }
    total
}

struct Squares<'a> {
    grads: &'a GradientsParams,
    counts: &'a dyn Fn(ParamId) -> bool,
    /// A module may hold one parameter in two fields; its gradient is one.
    seen: HashSet<ParamId>,
    sums: Vec<Tensor<1>>,
}

impl ModuleVisitor for Squares<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(grad) = self.grads.get::<D>(param.id) else { return };
        if (self.counts)(param.id) && self.seen.insert(param.id) {
            let narrow = matches!(grad.dtype(), DType::F16 | DType::BF16);
            let grad = if narrow { grad.cast(FloatDType::F32) } else { grad };
            self.sums.push(grad.square().sum());
        }
    }
}

struct Scale {
    grads: GradientsParams,
    factor: f64,
    seen: HashSet<ParamId>,
}

impl ModuleVisitor for Scale {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        if let Some(grad) = self.grads.remove::<D>(param.id) {
            self.grads.register::<D>(param.id, grad.mul_scalar(self.factor));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::clip_factor;

    #[test]
    fn clips_only_above_the_limit_and_lets_no_nan_pass() {
        assert_eq!(clip_factor(1.0, 0.5), 1.0);
        assert_eq!(clip_factor(1.0, 4.0), 1.0 / 4.000001);
        assert!(clip_factor(1.0, f64::NAN).is_nan());
        assert_eq!(clip_factor(1.0, f64::INFINITY), 0.0);
    }
}
