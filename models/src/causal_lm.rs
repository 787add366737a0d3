//! What the engine needs of a language model, whatever its family.

use std::fmt;

use backend_dist::shard::Registry;
use burn::module::Module;
use burn::tensor::{FloatDType, Int, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::config::ConfigError;
use crate::layers::paged::{PagedKvCache, Step};
use crate::layout::ModelDims;
use crate::micro_batch::MicroBatch;
use crate::names::NameMap;
use crate::param::{ParamBuilder, Result};
use crate::part::Part;

/// The sizes of a model and everything that follows from them without a tensor.
///
/// ```
/// use models::{LlamaConfig, ModelConfig};
///
/// let config = LlamaConfig { num_hidden_layers: 4, ..LlamaConfig::tiny() };
/// assert!(config.check().is_ok() && config.parameter_count() > 100_000);
/// // Eight heads over four key-value heads run on 1, 2, 4 or 8 tensor parallel ranks.
/// assert!(config.dims().check_tp(4).is_ok());
/// let refused = config.dims().check_tp(3).unwrap_err().to_string();
/// assert!(refused.contains("nearest legal: 2, 4"));
/// ```
pub trait ModelConfig: Clone + Send + Sync + Serialize + DeserializeOwned + 'static {
    /// Whether the sizes make a model, in any layout.
    ///
    /// # Errors
    /// Names the key, its value and the nearest legal ones.
    fn check(&self) -> Result<(), ConfigError> {
        Ok(())
    }

    /// Whether the model can compute in a type.
    ///
    /// # Errors
    /// Names the key that rules the type out, its value and the nearest legal ones.
    fn check_dtype(&self, _dtype: FloatDType) -> Result<(), ConfigError> {
        Ok(())
    }

    /// Whether the sizes make a model that the ranks of `params` can share.
    ///
    /// # Errors
    /// Names the key or size, its value and the nearest legal ones.
    fn check_for(&self, params: &ParamBuilder) -> Result<()> {
        self.check()?;
        self.check_dtype(params.dtype())?;
        let (dims, experts) = (self.dims(), params.experts());
        dims.check_tp(params.place().size)?;
        dims.check_experts(experts.etp.size, experts.ep.size, experts.group.size())?;
        Ok(())
    }

    /// What a layout must divide; see [`ModelDims::check`].
    fn dims(&self) -> ModelDims;

    /// Most positions of a sequence that is generated with a cache of keys and values.
    fn cached_positions(&self) -> Option<usize> {
        self.dims().max_positions
    }

    /// Why sequences that begin with the same tokens cannot share what a cache holds of these, if it is so.
    fn unshared_prefixes(&self) -> Option<UnsharedPrefixes> {
        self.dims().states.is_some().then_some(UnsharedPrefixes::States)
    }

    /// Number of tokens.
    fn vocab_size(&self) -> usize {
        self.dims().vocab
    }

    /// Where every global tensor is found in a Megatron-LM checkpoint of one rank.
    fn megatron_names(&self) -> NameMap;

    /// Where every global tensor is found in a Hugging Face checkpoint.
    fn hf_names(&self) -> NameMap;

    /// Known sizes by name, small ones for tests first.
    fn presets() -> Vec<(&'static str, Self)> {
        Vec::new()
    }

    /// The start of names that Hugging Face checkpoints of the bare model, without its output layer, leave out: the
    /// published GPT-2 files have `wte.weight` for `transformer.wte.weight`.
    fn hf_optional_prefix(&self) -> Option<&'static str> {
        None
    }

    /// Whether a tensor of a Hugging Face checkpoint is passed over: rotary frequencies, which old versions of transformers
    /// wrote, copies, and modules that the model does not have. `name` is without the optional prefix.
    fn hf_is_derived(&self, name: &str) -> bool {
        name.starts_with("model.") && name.ends_with("rotary_emb.inv_freq")
    }

    /// A copy of another tensor that some Hugging Face checkpoints hold, and that tensor: the output layer that shares
    /// the embedding, and the embedding.
    fn hf_tied_copy(&self) -> Option<[&'static str; 2]> {
        None
    }

    /// The model that a Hugging Face checkpoint has weights of, by the names of its tensors.
    fn hf_present(self, _has: impl Fn(&str) -> bool) -> Self {
        self
    }

    /// Number of parameters of the whole model, without padding.
    fn parameter_count(&self) -> usize {
        self.hf_names().iter().map(|(_, foreign)| foreign.our_shape().iter().product::<usize>()).sum()
    }
}

/// Why sequences that begin with the same tokens do not share them in a cache of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnsharedPrefixes {
    /// Recurrent layers keep one state of a sequence, that after its last token, and none of its blocks.
    States,
    /// Experts with a capacity drop tokens of a full step: keys and values depend on who else was in it.
    Capacity,
}

impl fmt::Display for UnsharedPrefixes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::States => "recurrent layers keep the state after the last token only",
            Self::Capacity => {
                "experts with moe-expert-capacity-factor drop tokens, depending on the other sequences of a step"
            }
        })
    }
}

/// A decoder that predicts the next token, or the [`Part`] of one that a pipeline stage holds.
///
/// It is a chain: embedding, layers, head. Whoever trains it calls the links one by one; the activations between two of
/// them are all that a later stage needs of an earlier one. Tokens and labels are `[b, s]` and the same on all ranks of
/// a tensor parallel group; activations are `[s, b, hidden]`, under sequence parallelism `[s/tp, b, hidden]`.
///
/// ```
/// use backend_dist::launch::{BoxError, Rank};
/// use burn::tensor::{Device, FloatDType, Int, Tensor};
/// use models::{CausalLm, Gpt, GptConfig, MicroBatch, ParamBuilder};
///
/// let rank = Rank::single(Device::flex());
/// let model = Gpt::build(&GptConfig::tiny(), ParamBuilder::new(&rank, FloatDType::F32, 1))?;
/// let tokens = Tensor::<2, Int>::from_data([[1, 2, 3]], &rank.device);
/// assert_eq!(model.logits(tokens.clone()).dims(), [1, 3, 256]);
/// // The same, link by link.
/// let batch = MicroBatch::default();
/// let mut x = model.embed(tokens, &batch);
/// for layer in model.part().layers.clone() {
///     x = model.layer(layer, x, &batch);
/// }
/// assert_eq!(model.head_logits(x).dims(), [1, 3, 256]);
/// # Ok::<(), BoxError>(())
/// ```
pub trait CausalLm: Module {
    /// The model's sizes.
    type Config: ModelConfig;

    /// Builds the rank's part of the model: of every layer its slice, and only what [`ParamBuilder::part`] says.
    ///
    /// # Errors
    /// If the model does not fit the number of tensor parallel ranks, or weights cannot be read.
    fn build(config: &Self::Config, params: ParamBuilder) -> Result<Self>;

    /// The part of the whole model that this is.
    fn part(&self) -> &Part;

    /// Whether sequences that begin with the same tokens can have the same blocks of a cache for them, and read only what
    /// follows: [`ModelConfig::unshared_prefixes`] says why not. The same for all parts of a model.
    fn shares_prefixes(&self) -> bool {
        false
    }

    /// The activations before the first layer.
    ///
    /// # Panics
    /// If the part does not begin with the embedding.
    fn embed(&self, tokens: Tensor<2, Int>, batch: &MicroBatch) -> Tensor<3>;

    /// The activations after layer `index`, counted over the whole model.
    ///
    /// # Panics
    /// If the part does not have the layer.
    fn layer(&self, index: usize, x: Tensor<3>, batch: &MicroBatch) -> Tensor<3>;

    /// From the activations after the last layer to the loss of every token, `-log p(labels[b, s])`, as `[b, s]` and
    /// the same on all ranks.
    ///
    /// # Panics
    /// If the part does not end with the head.
    fn head_losses(&self, x: Tensor<3>, labels: Tensor<2, Int>, batch: &MicroBatch) -> Tensor<2>;

    /// From the activations after the last layer to the logits of every position, `[b, s, vocab]`, gathered on all
    /// ranks and without padding.
    ///
    /// # Panics
    /// If the part does not end with the head.
    fn head_logits(&self, x: Tensor<3>) -> Tensor<3>;

    /// The activations after the last layer of a whole model.
    ///
    /// # Panics
    /// If the part does not begin with the embedding.
    fn hidden_states(&self, tokens: Tensor<2, Int>, batch: &MicroBatch) -> Tensor<3> {
        self.part().layers.clone().fold(self.embed(tokens, batch), |x, layer| self.layer(layer, x, batch))
    }

    /// The losses of a whole model, [`head_losses`](Self::head_losses).
    ///
    /// # Panics
    /// If the model is not whole.
    fn training_losses(&self, tokens: Tensor<2, Int>, labels: Tensor<2, Int>, batch: &MicroBatch) -> Tensor<2> {
        self.head_losses(self.hidden_states(tokens, batch), labels, batch)
    }

    /// The losses of whole sequences, without dropout.
    fn token_losses(&self, tokens: Tensor<2, Int>, labels: Tensor<2, Int>) -> Tensor<2> {
        self.training_losses(tokens, labels, &MicroBatch::default())
    }

    /// The logits of a whole model, [`head_logits`](Self::head_logits).
    ///
    /// # Panics
    /// If the model is not whole.
    fn logits(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.head_logits(self.hidden_states(tokens, &MicroBatch::default()))
    }

    /// Reads the tokens of a [`Step`], which follow those in the cache, each in its own sequence, and returns the logits
    /// after those of its tokens that it asks for, `[outputs, vocab]`, gathered on all ranks and without padding. They are
    /// those of [`logits`](Self::logits) of that sequence alone; only experts with a capacity see the other sequences.
    ///
    /// For generation: the model must not record gradients ([`ParamBuilder::without_autodiff`], [`Module::valid`]). The
    /// number of new tokens is free, also under sequence parallelism.
    ///
    /// ```
    /// use backend_dist::launch::{BoxError, Rank};
    /// use burn::tensor::{Device, FloatDType};
    /// use models::layers::paged::{Chunk, Outputs, Step};
    /// use models::{CausalLm, Llama, LlamaConfig, PagedKvCache, ParamBuilder};
    ///
    /// let rank = Rank::single(Device::flex());
    /// let params = ParamBuilder::new(&rank, FloatDType::F32, 1).without_autodiff();
    /// let model = Llama::build(&LlamaConfig::tiny(), params)?;
    /// // Two sequences in a cache of 8 blocks of 4 positions: five tokens need two blocks.
    /// let mut cache = PagedKvCache::new(8, 4);
    /// let chunk = |tokens: &[i64], first: usize, blocks: &[u32]| Chunk {
    ///     tokens: tokens.to_vec(),
    ///     positions: first..first + tokens.len(),
    ///     blocks: blocks.to_vec(),
    ///     outputs: Outputs::Last,
    /// };
    /// let prompts = Step::new(vec![chunk(&[1, 2, 3, 4, 5], 0, &[0, 3]), chunk(&[7, 8], 0, &[1])]);
    /// assert_eq!(model.extend(&prompts, &mut cache).dims(), [2, 256]);
    /// let next = Step::new(vec![chunk(&[6], 5, &[0, 3]), chunk(&[9], 2, &[1])]);
    /// assert_eq!(model.extend(&next, &mut cache).dims(), [2, 256]);
    /// # Ok::<(), BoxError>(())
    /// ```
    ///
    /// # Panics
    /// If a chunk has too few blocks, or the model no positions, or is not whole.
    fn extend(&self, step: &Step, cache: &mut PagedKvCache) -> Tensor<2> {
        cache.begin(step);
        let x = self.extend_embed(step);
        let x = self.part().layers.clone().fold(x, |x, layer| self.extend_layer(layer, x, step, cache));
        self.extend_head(x, step)
    }

    /// The first link of [`extend`](Self::extend): the activations of the step's tokens, `[tokens, 1, hidden]`, under
    /// sequence parallelism padded to a multiple of the ranks, of which each has its part.
    ///
    /// # Panics
    /// If the part does not begin with the embedding.
    fn extend_embed(&self, step: &Step) -> Tensor<3>;

    /// A layer of [`extend`](Self::extend), counted over the whole model. Before the first layer of a step someone calls
    /// [`PagedKvCache::begin`].
    ///
    /// # Panics
    /// If the part does not have the layer.
    fn extend_layer(&self, index: usize, x: Tensor<3>, step: &Step, cache: &mut PagedKvCache) -> Tensor<3>;

    /// The last link of [`extend`](Self::extend): the logits that the step asks for.
    ///
    /// # Panics
    /// If the part does not end with the head.
    fn extend_head(&self, x: Tensor<3>, step: &Step) -> Tensor<2>;

    /// The rank's parameters, with the global tensors that they are slices of.
    fn registry(&self) -> &Registry;
}
