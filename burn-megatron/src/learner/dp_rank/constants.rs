//! Tensors of a module that are no parameters, for devices with gradient checkpointing.

use std::collections::VecDeque;

use burn::module::{Flag, Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::Tensor;

/// `module`, with states of its own, whose constants and parameters of integers are without autodiff.
///
/// Burn moves them with what they know of autodiff, and refuses an operation on two tensors of which one alone has gradient
/// checkpointing. A tensor without autodiff is a constant to the others, whatever they have.
pub(in crate::learner) fn with_plain_constants<M: Module>(module: &M) -> M {
    let mut training = Training::default();
    module.visit(&mut training);
    // A validation copy is without autodiff, and its layers do not train.
    module.valid().map(&mut training)
}

/// What of a module trains, in the order in which it has it.
#[derive(Default)]
struct Training {
    /// Float parameters.
    parameters: VecDeque<bool>,
    /// Layers that compute something else then, as batch normalization.
    flags: VecDeque<bool>,
}

impl ModuleVisitor for Training {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.parameters.push_back(param.is_require_grad());
    }

    fn visit_flag(&mut self, param: &Param<Flag>) {
        self.flags.push_back(param.val().is_enabled());
    }
}

impl ModuleMapper for Training {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let is_trained = self.parameters.pop_front().expect("a module maps the parameters that it visits");
        param.map(|value| Tensor::from_inner(value).set_require_grad(is_trained))
    }

    fn map_flag(&mut self, param: Param<Flag>) -> Param<Flag> {
        param.with_value(self.flags.pop_front().expect("a module maps the flags that it visits"))
    }
}
