//! A model whose adapters change nothing.

use std::collections::HashSet;

use burn::module::{ModuleMapper, Param};
use burn::tensor::Tensor;

use crate::CausalLm;

/// The same model with B = 0 in every adapter: it computes, bit for bit, what its frozen weights do without adapters. Its
/// other parameters are those of `model`, not copies.
///
/// Not for DoRA, whose magnitudes would have to be those of the frozen weights again.
pub fn without_adapters<M: CausalLm>(model: M) -> M {
    let is_b = |name: &str| name.ends_with(".lora_B.weight");
    let ids = model.registry().iter().filter(|spec| is_b(spec.name())).map(|spec| spec.id).collect();
    model.map(&mut Zero(ids))
}

struct Zero(HashSet<u64>);

impl ModuleMapper for Zero {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.0.contains(&param.id.val()) {
            return param;
        }
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, tensor.zeros_like().set_require_grad(false), mapper)
    }
}
