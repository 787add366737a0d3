//! Parameters of another model: models with different adapters hold the weights under them once.

use std::any::Any;
use std::collections::HashMap;

use backend_dist::shard::{Registry, Section, stable_hash};
use burn::module::{ModuleVisitor, Param};
use burn::tensor::{DType, FloatDType, Tensor};

use super::ParamBuilder;
use crate::CausalLm;

/// By parameter: its sections, and its tensor of any rank without autodiff.
pub(super) type Shared = HashMap<u64, (Vec<Section>, Box<dyn Any>)>;

impl ParamBuilder<'_> {
    /// What `model` has of the same slices in the same type is its tensor, and is neither read nor drawn again. Not adapters,
    /// what is trained with autodiff, and what [`with_base`](Self::with_base) stores in few bits.
    pub fn with_weights_of<M: CausalLm>(mut self, model: &M) -> Self {
        let mut found = Found { registry: model.registry(), shared: HashMap::new() };
        model.visit(&mut found);
        self.shared = found.shared;
        self
    }

    /// The tensor of these sections, if another model has it.
    pub(super) fn shared<const D: usize>(&self, sections: &[&Section], dtype: FloatDType) -> Option<Tensor<D>> {
        let (known, tensor) = self.shared.get(&stable_hash(&sections.first()?.name))?;
        let tensor = tensor.downcast_ref::<Tensor<D>>()?;
        let is_same = known.iter().eq(sections.iter().copied()) && tensor.dtype() == DType::from(dtype);
        (is_same && tensor.device() == self.device.clone().without_autodiff()).then(|| tensor.clone())
    }
}

struct Found<'a> {
    registry: &'a Registry,
    shared: Shared,
}

impl ModuleVisitor for Found<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(spec) = self.registry.get(param.id.val()) {
            self.shared.insert(spec.id, (spec.sections.clone(), Box::new(param.val().inner())));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::Arc;

    use backend_dist::launch::{BoxError, Rank, launch};
    use backend_dist::mesh::Mesh;
    use backend_dist::shard::WeightSource;
    use burn::tensor::{Device, Int};

    use super::*;
    use crate::lora::{LoraConfig, without_adapters};
    use crate::{DeepSeekV3, DeepSeekV3Config, Llama, LlamaConfig, Mixtral, MixtralConfig, ModelConfig};

    /// A source that nobody may read.
    struct Closed;

    impl WeightSource for Closed {
        fn read(&self, name: &str, _: &[usize], _: &[Range<usize>]) -> Result<Vec<f64>, BoxError> {
            Err(format!("{name} is read again").into())
        }
    }

    fn logits<M: CausalLm>(rank: &Rank, model: &M) -> Vec<f64> {
        let tokens = Tensor::<2, Int>::from_data([[1, 2, 3, 4]], &rank.device);
        model.logits(tokens).into_data().iter::<f64>().collect()
    }

    /// Adapters that change nothing yet, of one model and then of another with other adapters.
    fn assert_shares<M: CausalLm>(config: &M::Config, targets: [&str; 2]) {
        for layout in ["TP1", "TP2 SP"] {
            let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
            let shares = |rank: Rank| {
                let params = || ParamBuilder::new(&rank, FloatDType::F64, 1).without_autodiff();
                let base = M::build(config, params())?;
                let adapted = |target: &str, model: &M| -> Result<M, BoxError> {
                    let dora = target == targets[1];
                    let lora = LoraConfig { target_modules: vec![target.into()], dora, ..LoraConfig::default() };
                    let plan = Arc::new(lora.plan(&config.hf_names())?);
                    let params = params().with_source(&Closed).with_lora(&plan, None).with_weights_of(model);
                    Ok(M::build(config, params)?)
                };
                let first = adapted(targets[0], &base)?;
                let second = adapted(targets[1], &first)?;
                let expected = logits(&rank, &base);
                assert_eq!(logits(&rank, &without_adapters(first)), expected, "{layout}");
                let gap = expected.iter().zip(logits(&rank, &second)).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(gap < 1e-12, "{layout}: DoRA divides by norms that it multiplies with: {gap}");
                Ok(())
            };
            launch(&mesh, &[Device::flex()], shares).unwrap();
        }
    }

    #[test]
    fn models_with_adapters_have_the_weights_of_one_without_and_read_nothing() {
        assert_shares::<Llama>(&LlamaConfig::tiny(), ["all-linear", "q_proj"]);
        assert_shares::<Mixtral>(&MixtralConfig::tiny(), ["experts.*", "o_proj"]);
        assert_shares::<DeepSeekV3>(&DeepSeekV3Config::tiny(), ["o_proj", "down_proj"]);
    }

    #[test]
    fn what_differs_is_read() {
        let (rank, config) = (Rank::single(Device::flex()), LlamaConfig::tiny());
        let params = |dtype| ParamBuilder::new(&rank, dtype, 1);
        let base = Llama::build(&config, params(FloatDType::F64).without_autodiff()).unwrap();
        let other = LlamaConfig { intermediate_size: 2 * config.intermediate_size, ..config.clone() };
        let refused = |config: &LlamaConfig, params: ParamBuilder| {
            let built = Llama::build(config, params.with_source(&Closed).with_weights_of(&base));
            built.map(drop).unwrap_err().to_string()
        };
        assert!(refused(&config, params(FloatDType::F32).without_autodiff()).contains("embed"));
        assert!(refused(&config, params(FloatDType::F64)).contains("embed"), "what is trained is a model's own");
        assert!(refused(&other, params(FloatDType::F64).without_autodiff()).contains("mlp"));
    }
}
