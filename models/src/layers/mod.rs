//! Parallel layers. Each holds its shard of the weights and communicates what its neighbours need; on one rank each is
//! the plain layer.

mod attention;
pub(crate) mod attention_logits;
mod block;
mod dropout;
mod dynamic;
mod embedding;
mod feed_forward;
mod fp32_norm;
mod fp32_softmax;
mod frequencies;
mod gated_delta;
mod linear;
mod linear_weight;
mod longrope;
mod mamba;
mod mixer;
mod mla;
mod mlp;
pub mod moe;
mod mtp;
mod norm;
mod output;
pub mod paged;
mod pattern;
mod predictors;
mod projection_norm;
mod query_key_norm;
mod recurrent;
mod replicated;
mod rope;
mod row_linear;
mod tensor_parallel;
mod trigonometry;
mod weight_dropout;
mod yarn;

pub use crate::micro_batch::DropoutKey;
pub use attention::{AttentionConfig, SelfAttention};
pub use attention_logits::AttentionLogits;
pub(crate) use block::Decoded;
pub use block::{BlockConfig, NormPlacement, TransformerBlock};
pub use dropout::Dropout;
pub use dynamic::DynamicScaling;
pub use embedding::{LearnedPositions, Vocab, VocabParallelEmbedding, VocabShard};
pub use feed_forward::FeedForward;
pub use frequencies::{LinearScaling, Llama3Scaling, RopeConfig, RopeScaling};
pub use gated_delta::{GatedDeltaConfig, GatedDeltaNet};
pub use linear::{ColumnParallelLinear, LinearConfig, Output};
pub(crate) use linear_weight::LinearWeight;
pub use longrope::{LongRopeScaling, PairFactors};
pub use mamba::{Mamba2Mixer, Mamba2MixerConfig};
pub use mixer::Mixer;
pub use mla::{LatentAttention, MlaConfig};
pub use mlp::{Activation, Mlp, MlpConfig};
pub use moe::{
    Balance, BalanceOver, Capacity, Dispatcher, DropPolicy, ExpertGroups, ExpertKind, Ffn, MoeConfig, MoeLayer,
    RouterConfig, RouterDevice, Scores, SharedExperts,
};
pub use mtp::{MtpProjection, ahead, with_mtp_losses};
pub use norm::{Norm, NormKind};
pub use output::OutputLayer;
pub use paged::PagedKvCache;
pub use pattern::LayerPattern;
pub(crate) use predictors::Predictors;
pub use query_key_norm::{NormOver, QueryKeyNorm};
pub use replicated::ReplicatedLinear;
pub use rope::{Angles, LayerRopes, RotaryEmbedding, rotate};
pub use row_linear::RowParallelLinear;
pub(crate) use tensor_parallel::{enter_tensor_parallel, leave_tensor_parallel};
pub use yarn::YarnScaling;
