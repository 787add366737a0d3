//! Every layout trains like one device in double precision, and the comparison notices when one does not.

use backend_dist::shard::{ParamSpec, Registry};
use burn::module::Module;
use burn::tensor::{Int, Tensor};
use burn_megatron::verify::{Candidate, Row, Settings, TOLERANCE, candidates, verify};
use models::layers::DropoutKey;
use models::llama::{Llama, LlamaConfig};
use models::param::{BuildError, ParamBuilder};
use models::{CausalLm, ModelConfig};

const SETTINGS: Settings = Settings { steps: 3, global_batch: 8, seq: 16, seed: 1234, tolerance: TOLERANCE };

/// A Llama whose norms are registered as if sequence parallelism did not cut what they see: the sum of their gradients
/// over the tensor parallel ranks is forgotten.
#[derive(Module, Debug)]
struct ForgottenSum {
    inner: Llama,
    #[module(skip)]
    registry: Registry,
}

impl CausalLm for ForgottenSum {
    type Config = LlamaConfig;

    fn build(config: &LlamaConfig, params: ParamBuilder) -> Result<Self, BuildError> {
        let inner = Llama::build(config, params)?;
        let mut registry = Registry::default();
        for spec in inner.registry().iter() {
            registry.register(ParamSpec { sequence_parallel: false, ..spec.clone() })?;
        }
        Ok(Self { inner, registry })
    }

    fn training_losses(&self, tokens: Tensor<2, Int>, labels: Tensor<2, Int>, key: Option<&DropoutKey>) -> Tensor<2> {
        self.inner.training_losses(tokens, labels, key)
    }

    fn logits(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.inner.logits(tokens)
    }

    fn registry(&self) -> &Registry {
        &self.registry
    }
}
