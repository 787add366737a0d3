//! Clipping on one device, as PyTorch does it.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use crate::classifier::Classifier;

/// PyTorch's `clip_grad_norm_`, written down again.
pub fn clip_grad_norm(model: &Classifier, grads: GradientsParams, max_norm: f64) -> GradientsParams {
    struct Norm<'a>(&'a GradientsParams, f64);
    impl ModuleVisitor for Norm<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let grad = self.0.get::<D>(param.id).into_iter();
            self.1 +=
                grad.flat_map(|grad| grad.into_data().iter::<f64>().collect::<Vec<_>>()).map(|x| x * x).sum::<f64>();
        }
    }
    struct Scale(GradientsParams, f64);
    impl ModuleVisitor for Scale {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(grad) = self.0.remove::<D>(param.id) {
                self.0.register::<D>(param.id, grad * self.1);
            }
        }
    }
    let mut norm = Norm(&grads, 0.0);
    model.visit(&mut norm);
    let factor = (max_norm / (norm.1.sqrt() + 1e-6)).min(1.0);
    let mut scale = Scale(grads, factor);
    model.visit(&mut scale);
    scale.0
}
