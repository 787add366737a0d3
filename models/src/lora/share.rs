//! Models with different adapters of the same weights.

use std::any::Any;
use std::collections::HashMap;

use burn::module::{ModuleMapper, ModuleVisitor, Param};
use burn::tensor::Tensor;

use crate::CausalLm;

/// `model` with the tensors of `base` wherever both have a parameter of one name: a model with adapters, and the same
/// model without or with others, hold the frozen weights once.
pub fn with_weights_of<M: CausalLm>(model: M, base: &M) -> M {
    let names: HashMap<u64, String> = base.registry().iter().map(|spec| (spec.id, spec.name().to_string())).collect();
    let mut found = Found { names, tensors: HashMap::new() };
    base.visit(&mut found);
    let names = model.registry().iter().map(|spec| (spec.id, spec.name().to_string())).collect();
    model.map(&mut Replaced { names, tensors: found.tensors })
}

struct Found {
    /// By parameter.
    names: HashMap<u64, String>,
    /// Of any rank, by name.
    tensors: HashMap<String, Box<dyn Any>>,
}

impl ModuleVisitor for Found {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(name) = self.names.get(&param.id.val()) {
            self.tensors.insert(name.clone(), Box::new(param.val()));
        }
    }
}

struct Replaced {
    names: HashMap<u64, String>,
    tensors: HashMap<String, Box<dyn Any>>,
}

impl ModuleMapper for Replaced {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let of_base = self.names.get(&param.id.val()).and_then(|name| self.tensors.get(name));
        let Some(shared) = of_base.and_then(|tensor| tensor.downcast_ref::<Tensor<D>>()) else { return param };
        let (id, tensor, mapper) = param.consume();
        if tensor.dims() != shared.dims() || tensor.dtype() != shared.dtype() {
            return Param::from_mapped_value(id, tensor, mapper);
        }
        Param::from_mapped_value(id, shared.clone(), mapper)
    }
}
