//! The values that a rank holds, in host memory, and a whole model of those of all ranks.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Tensor, TensorData};

/// Values of parameters and running states, by id.
pub(super) type Values = HashMap<ParamId, TensorData>;

/// The values of those parameters and running states of `model` that `is_saved`.
pub(super) fn values<M: Module>(model: &M, is_saved: impl Fn(ParamId) -> bool) -> Values {
    let mut read = Read { is_saved: &is_saved, values: HashMap::new() };
    // A running state holds back its last update; a validation copy has it applied.
    model.valid().visit(&mut read);
    read.values
}

/// `model` with these values.
pub(super) fn with_values<M: Module>(model: M, values: Values) -> M {
    model.map(&mut Write { values })
}

struct Read<'a> {
    is_saved: &'a dyn Fn(ParamId) -> bool,
    values: Values,
}

impl ModuleVisitor for Read<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if (self.is_saved)(param.id) && !self.values.contains_key(&param.id) {
            self.values.insert(param.id, param.base().into_data());
        }
    }
}

struct Write {
    values: Values,
}

impl ModuleMapper for Write {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(data) = self.values.get(&param.id).cloned() else { return param };
        param.map(|old| {
            let device = old.device().inner();
            let new = Tensor::from_data(data, (&device, old.dtype()));
            match (old.is_autodiff(), old.is_require_grad()) {
                (true, tracked) => Tensor::from_inner(new).set_require_grad(tracked),
                (false, _) => new,
            }
        })
    }
}
