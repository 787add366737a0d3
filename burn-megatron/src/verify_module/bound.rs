//! How equal layouts can be.

use std::collections::BTreeSet;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;

use crate::verify::TOLERANCE;

/// Layers that Burn computes in `f32` whatever the type is: the mean square of `RmsNorm`, all of `DeformConv2d` on a CPU.
const SINGLE: [&str; 2] = ["RmsNorm", "DeformConv2d"];
/// The bound of a module with one: another order of a sum is rounded to another number.
const OF_SINGLE: f64 = 1e-5;

/// The bound on GPUs, where some functions of Burn are less exact than `f64`: gradients of BERT, ViT and LLaVA on one H200
/// are up to 3.2e-6 from those of a CPU, and the same in all layouts.
pub const ON_GPUS: f64 = 1e-5;

/// Largest relative difference that rounding alone can explain.
pub(super) fn bound<M: Module>(module: &M) -> f64 {
    let mut types = Types::default();
    module.visit(&mut types);
    if SINGLE.iter().any(|layer| types.0.contains(*layer)) { OF_SINGLE } else { TOLERANCE }
}

/// The types that hold parameters.
#[derive(Default)]
struct Types(BTreeSet<String>);

impl ModuleVisitor for Types {
    fn enter_module(&mut self, _: &str, container: &str) {
        self.0.insert(container.rsplit(':').next().unwrap_or_default().to_string());
    }

    fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<D>>) {}
}

#[cfg(test)]
mod tests {
    use burn::nn::{LinearConfig, RmsNormConfig};
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn a_layer_in_single_precision_is_found_at_any_depth() {
        let device = Device::flex();
        let (linear, norm) = (LinearConfig::new(2, 2).init(&device), RmsNormConfig::new(2).init(&device));
        assert_eq!((bound(&linear), bound(&norm)), (TOLERANCE, OF_SINGLE));
        assert_eq!(bound(&(linear, vec![norm])), OF_SINGLE);
    }
}
