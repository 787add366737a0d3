//! Values of modules that do not depend on a generator, which all tests share, and all of a module's.

use burn::module::{ModuleMapper, ModuleVisitor, Param};
use burn::prelude::*;

/// Gives parameters values that do not depend on a generator.
#[derive(Default)]
pub struct Known {
    index: usize,
    fields: Vec<String>,
}

impl ModuleMapper for Known {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.fields.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.fields.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !param.is_require_grad() {
            return param;
        }
        self.index += 1;
        let index = self.index;
        let one = if self.fields.last().is_some_and(|name| name == "gamma") { 1.0 } else { 0.0 };
        param.map(|old| {
            let value = |i: usize| one + ((i * 7 + index * 5) as f64 * 0.9).sin() / 4.0;
            let values = (0..old.shape().num_elements()).map(value).collect::<Vec<f64>>();
            Tensor::from_data(TensorData::new(values, old.dims()), &old.device()).require_grad()
        })
    }
}

/// Every number of a module.
#[derive(Default)]
pub struct All(pub Vec<f64>);

impl ModuleVisitor for All {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.extend(param.val().into_data().iter::<f64>());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.0.extend(param.val().into_data().iter::<f64>());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.0.extend(param.val().into_data().iter::<bool>().map(f64::from));
    }
}
