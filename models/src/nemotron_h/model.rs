//! The forward pass of a Nemotron-H: that of a Llama with other blocks.

use backend_dist::shard::Registry;
use burn::module::Module;
use burn::tensor::{Int, Tensor};

use super::config::NemotronHConfig;
use crate::causal_lm::{CausalLm, ModelConfig};
use crate::layers::paged::{PagedKvCache, Step};
use crate::llama::Llama;
use crate::micro_batch::MicroBatch;
use crate::param::{BuildError, ParamBuilder};
use crate::part::Part;

/// A rank's part of a Nemotron-H.
#[derive(Module, Debug)]
pub struct NemotronH {
    decoder: Llama,
}

impl CausalLm for NemotronH {
    type Config = NemotronHConfig;

    fn build(config: &NemotronHConfig, params: ParamBuilder) -> Result<Self, BuildError> {
        config.check_for(&params)?;
        Ok(Self { decoder: Llama::of_blocks(&config.frame(), |layer| config.block(layer), params)? })
    }

    fn part(&self) -> &Part {
        self.decoder.part()
    }

    fn embed(&self, tokens: Tensor<2, Int>, batch: &MicroBatch) -> Tensor<3> {
        self.decoder.embed(tokens, batch)
    }

    fn layer(&self, index: usize, x: Tensor<3>, batch: &MicroBatch) -> Tensor<3> {
        self.decoder.layer(index, x, batch)
    }

    fn head_losses(&self, x: Tensor<3>, labels: Tensor<2, Int>, batch: &MicroBatch) -> Tensor<2> {
        self.decoder.head_losses(x, labels, batch)
    }

    fn head_logits(&self, x: Tensor<3>) -> Tensor<3> {
        self.decoder.head_logits(x)
    }

    fn extend(&self, step: &Step, cache: &mut PagedKvCache) -> Tensor<2> {
        self.decoder.extend(step, cache)
    }

    fn extend_embed(&self, step: &Step) -> Tensor<3> {
        self.decoder.extend_embed(step)
    }

    fn extend_layer(&self, index: usize, x: Tensor<3>, step: &Step, cache: &mut PagedKvCache) -> Tensor<3> {
        self.decoder.extend_layer(index, x, step, cache)
    }

    fn extend_head(&self, x: Tensor<3>, step: &Step) -> Tensor<2> {
        self.decoder.extend_head(x, step)
    }

    fn registry(&self) -> &Registry {
        self.decoder.registry()
    }
}
