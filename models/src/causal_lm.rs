//! What the engine needs of a language model, whatever its family.

use backend_dist::shard::Registry;
use burn::module::Module;
use burn::tensor::{Int, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::config::ConfigError;
use crate::layers::{DropoutKey, KvCache};
use crate::layout::ModelDims;
use crate::names::NameMap;
use crate::param::{BuildError, ParamBuilder};

/// The sizes of a model and what follows from them without any tensor.
pub trait ModelConfig: Clone + Send + Sync + Serialize + DeserializeOwned + 'static {
    /// Whether the sizes make a model, in any layout.
    ///
    /// # Errors
    /// Names the key, its value and the nearest legal ones.
    fn check(&self) -> Result<(), ConfigError> {
        Ok(())
    }

    /// Whether a model of these sizes can also be trained.
    ///
    /// # Errors
    /// As [`ModelConfig::check`], and where training would need something that these models do not do.
    fn check_training(&self) -> Result<(), ConfigError> {
        self.check()
    }

    /// What a layout must divide; see [`ModelDims::check`].
    fn dims(&self) -> ModelDims;

    /// Number of tokens.
    fn vocab_size(&self) -> usize;

    /// Where every global tensor is found in a Megatron-LM checkpoint of one rank.
    fn megatron_names(&self) -> NameMap;

    /// Where every global tensor is found in a Hugging Face checkpoint.
    fn hf_names(&self) -> NameMap;

    /// Number of parameters of the whole model, without padding.
    fn parameter_count(&self) -> usize {
        self.hf_names().iter().map(|(_, foreign)| foreign.our_shape().iter().product::<usize>()).sum()
    }
}

/// A decoder that predicts the next token.
///
/// Tokens and labels are `[b, s]` and the same on all ranks of a tensor parallel group.
pub trait CausalLm: Module {
    /// The model's sizes.
    type Config: ModelConfig;

    /// Builds the rank's part of the model.
    ///
    /// # Errors
    /// If the model does not fit the number of tensor parallel ranks, or weights cannot be read.
    fn build(config: &Self::Config, params: ParamBuilder) -> Result<Self, BuildError>;

    /// The loss of every token, `-log p(labels[b, s])`, as `[b, s]` and the same on all ranks. With a key, dropout is
    /// applied.
    fn training_losses(
        &self,
        tokens: Tensor<2, Int>,
        labels: Tensor<2, Int>,
        dropout: Option<&DropoutKey>,
    ) -> Tensor<2>;

    /// The losses without dropout.
    fn token_losses(&self, tokens: Tensor<2, Int>, labels: Tensor<2, Int>) -> Tensor<2> {
        self.training_losses(tokens, labels, None)
    }

    /// The logits of every position, `[b, s, vocab]`, gathered on all ranks and without padding.
    fn logits(&self, tokens: Tensor<2, Int>) -> Tensor<3>;

    /// Reads `tokens [b, n]`, which follow those in the cache, and gives the logits after the last one, `[b, vocab]`,
    /// gathered on all ranks and without padding. What [`logits`](Self::logits) gives for the last of all tokens, at
    /// the cost of the new ones.
    ///
    /// For generation: the model must not record gradients ([`ParamBuilder::without_autodiff`],
    /// [`Module::valid`]). The number of new tokens is free, also under sequence
    /// parallelism.
    ///
    /// # Panics
    /// If the cache has no room for the new tokens, or the model no positions.
    fn extend(&self, tokens: Tensor<2, Int>, cache: &mut KvCache) -> Tensor<2>;

    /// What the rank's parameters are slices of.
    fn registry(&self) -> &Registry;
}
