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

#[cfg(test)]
mod tests {
    use backend_dist::launch::Rank;
    use burn::tensor::{Device, FloatDType, Int, Tensor};

    use super::*;
    use crate::lora::LoraConfig;
    use crate::{Llama, LlamaConfig, ModelConfig, ParamBuilder};

    /// The weights of another seed, and adapters that change nothing yet.
    #[test]
    fn a_model_with_adapters_takes_the_weights_of_one_without() {
        let (rank, config) = (Rank::single(Device::flex()), LlamaConfig::tiny());
        let plan = std::sync::Arc::new(LoraConfig::default().plan(&config.hf_names()).unwrap());
        let params = |seed| ParamBuilder::new(&rank, FloatDType::F64, seed).without_autodiff();
        let base = Llama::build(&config, params(1)).unwrap();
        let adapted = Llama::build(&config, params(2).with_lora(&plan, None)).unwrap();
        let logits = |model: &Llama| {
            let tokens = Tensor::<2, Int>::from_data([[1, 2, 3]], &rank.device);
            model.logits(tokens).into_data().iter::<f64>().collect::<Vec<_>>()
        };
        assert_ne!(logits(&adapted), logits(&base));
        assert_eq!(logits(&with_weights_of(adapted, &base)), logits(&base));
    }
}
