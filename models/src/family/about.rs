//! What a family says of itself, so that those who know it by name only can use it: the command line, `verify`, `prune`
//! and `replay`.

use serde_json::Value;

use crate::frame::DecoderConfig;
use crate::hf::{HfArchitecture, HfError};

/// A family that [`FamilyConfig`](crate::FamilyConfig) can have. All that anyone else knows of it is said here, in
/// [`ModelConfig`](crate::ModelConfig) and in [`DecoderConfig`].
pub trait Family: DecoderConfig + PartialEq {
    /// Keys of the configuration that no other family has, and their meaning.
    const SIZES: &'static [(&'static str, &'static str)] = &[];

    /// Hugging Face's names of its models.
    fn architectures() -> Vec<HfArchitecture>;

    /// Reads the `config.json` of a model of `kind`, a `model_type` of its [`architectures`](Self::architectures).
    ///
    /// # Errors
    /// Names the key that is missing, unknown, or asks for something the family does not do.
    fn read_hf(config: &Value, kind: &str) -> Result<Self, HfError>;

    /// The `config.json` of this model, in the form of transformers 5.
    ///
    /// # Errors
    /// If Hugging Face's model cannot say what this one does.
    fn write_hf(&self) -> Result<Value, HfError>;

    /// The relatives that have a key, by their `variant`; none where all have it.
    fn owners(_key: &str) -> Vec<String> {
        Vec::new()
    }

    /// Whether whoever names the family only must give a size, which is `value` in the first preset.
    fn is_needed(_key: &str, value: &Value) -> bool {
        value.is_u64()
    }

    /// Small models of these sizes that together have everything the family has: `verify` trains them.
    fn samples(_sizes: &SampleSizes) -> Vec<Sample<Self>> {
        Vec::new()
    }

    /// The model of Megatron-LM with these arguments, if it is of this family.
    fn of_megatron(_model: &MegatronModel) -> Option<Self> {
        None
    }

    /// The model that is left when layers go and others become narrower, if the family's weights can be pruned.
    fn pruned(&self, _to: &PrunedSizes) -> Option<Self> {
        None
    }
}

/// A small model of a family.
#[derive(Clone, Debug)]
pub struct Sample<C> {
    /// Its name at the command line.
    pub name: &'static str,
    /// What tells it from others.
    pub about: &'static str,
    /// The model.
    pub config: C,
}

impl<C> Sample<C> {
    /// A model with its name, and what tells it from others.
    pub fn new(name: &'static str, about: &'static str, config: C) -> Self {
        Self { name, about, config }
    }
}

/// The sizes of [`Family::samples`].
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names say it")]
pub struct SampleSizes {
    pub layers: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub vocab: usize,
    /// Tokens of a sequence.
    pub seq: usize,
    /// Of activations and attention weights, where transformers' model has it.
    pub dropout: f64,
}

impl SampleSizes {
    /// Features of a head.
    pub fn head_dim(&self) -> usize {
        self.hidden / self.heads.max(1)
    }
}

/// Two layers of width 32.
impl Default for SampleSizes {
    fn default() -> Self {
        Self { layers: 2, hidden: 32, intermediate: 64, heads: 4, kv_heads: 2, vocab: 101, seq: 16, dropout: 0.1 }
    }
}

/// A `GPTModel` of Megatron-LM with RMSNorm, rotary positions, SwiGLU and no biases. Fields have the names of its arguments.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names are Megatron-LM's")]
pub struct MegatronModel {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub ffn_hidden_size: usize,
    pub num_layers: usize,
    pub num_attention_heads: usize,
    pub num_query_groups: usize,
    pub rotary_base: f64,
    pub norm_epsilon: f64,
    /// Not `untie_embeddings_and_output_weights`.
    pub tied: bool,
    /// Experts in the place of every MLP.
    pub experts: Option<MegatronExperts>,
}

impl MegatronModel {
    /// Features of a head (`kv_channels`).
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.num_attention_heads
    }
}

/// The experts of a [`MegatronModel`].
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names are Megatron-LM's")]
pub struct MegatronExperts {
    pub num_experts: usize,
    pub moe_router_topk: usize,
    pub moe_ffn_hidden_size: usize,
    pub moe_aux_loss_coeff: f64,
}

/// What is left of a model that is pruned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrunedSizes {
    /// The layers that stay, in ascending order.
    pub layers: Vec<usize>,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLPs.
    pub intermediate: usize,
    /// Key-value heads; as many query heads share one as before.
    pub kv_heads: usize,
}
