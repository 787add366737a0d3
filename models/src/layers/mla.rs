//! Multi-head latent attention (DeepSeek-V2, <https://arxiv.org/abs/2405.04434>, section 2.1): queries, keys and values
//! come from two short vectors per position, its latents; every rank has some of the heads.
//!
//! The projections down to the latents are whole on every rank; each rank computes the latents of its positions.
//! Sequence parallelism gathers the latents, which are shorter than the hidden states, and the part of the key that is
//! rotated and shared by all heads.

use backend_dist::ops::context::attention_over_context;
use backend_dist::ops::{AttentionOptions, Prologue, Residual, latent_keys, split};
use backend_dist::shard::Init;
use burn::module::Module;
use burn::tensor::Tensor;

use super::frequencies::RopeConfig;
use super::linear::{ColumnParallelLinear, LinearConfig, Output, pad_sequence};
use super::norm::{Norm, NormKind};
use super::paged::{LatentHeads, PagedKvCache, Step};
use super::replicated::ReplicatedLinear;
use super::rope::{Angles, rotate};
use super::row_linear::RowParallelLinear;
use super::tensor_parallel::enter_tensor_parallel;
use crate::micro_batch::MicroBatch;
use crate::param::{ParamBuilder, Result, TensorParallel};
use crate::recompute;

/// Sizes of a latent attention layer. None of its projections has a bias.
#[derive(Clone, Copy, Debug)]
pub struct MlaConfig {
    /// Features in and out.
    pub hidden: usize,
    /// Heads.
    pub heads: usize,
    /// Features of the queries' latent; without one queries come from the hidden states.
    pub q_lora_rank: Option<usize>,
    /// Features of the latent of keys and values.
    pub kv_lora_rank: usize,
    /// Features of a query and key head that are not rotated.
    pub qk_nope_head_dim: usize,
    /// Features of a query head that are rotated, and of the rotated key that all heads share.
    pub qk_rope_head_dim: usize,
    /// Features of a value head.
    pub v_head_dim: usize,
    /// The rotation.
    pub rope: RopeConfig,
    /// Other systems rotate neighbouring features with each other.
    pub interleaved: bool,
    /// Epsilon of the RMSNorms of the latents.
    pub norm_eps: f64,
    /// Factor of the scores.
    pub scale: f64,
    /// Distribution of the weights.
    pub input: Init,
    /// Distribution of the weights of the projection that is added to the residual stream.
    pub output: Init,
}

/// Latent attention. A query head is `[rotated | not rotated]`, and so is a key head: the name maps tell where
/// other systems have these matrix rows.
#[derive(Module, Debug)]
pub struct LatentAttention {
    /// To `[queries' latent | keys' and values' latent | shared rotated key]`.
    down: ReplicatedLinear,
    q_norm: Option<Norm>,
    q: ColumnParallelLinear,
    kv_norm: Norm,
    kv: ColumnParallelLinear,
    out: RowParallelLinear,
    #[module(skip)]
    sizes: Sizes,
    #[module(skip)]
    options: AttentionOptions,
    #[module(skip)]
    parallel: TensorParallel,
    #[module(skip)]
    recompute_core: bool,
}

/// Features of the latents and of a head's parts, and the rank's heads.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    q_latent: usize,
    kv_latent: usize,
    rotated: usize,
    unrotated: usize,
    value: usize,
    heads: usize,
}

impl LatentAttention {
    /// A layer under the global name `name`. The tensors have Hugging Face's names.
    pub fn new(params: &mut ParamBuilder, name: &str, config: &MlaConfig) -> Result<Self> {
        let MlaConfig { hidden, heads, kv_lora_rank, input, norm_eps, .. } = *config;
        let (rotated, unrotated, value) = (config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim);
        let parts = params.place().size;
        let linear = |init| LinearConfig { bias: false, init };
        let named = |part: &str| format!("{name}.{part}");
        let (q_a, kv_a) = (named("q_a_proj"), named("kv_a_proj_with_mqa"));
        let (q_name, q_inputs) = match config.q_lora_rank {
            Some(rank) => (named("q_b_proj"), rank),
            None => (named("q_proj"), hidden),
        };
        let down = match config.q_lora_rank {
            Some(rank) => vec![(q_a.as_str(), rank), (&kv_a, kv_lora_rank + rotated)],
            None => vec![(kv_a.as_str(), kv_lora_rank + rotated)],
        };
        let q = Output { name: &q_name, features: heads * (rotated + unrotated), parts };
        let kv = Output { name: &named("kv_b_proj"), features: heads * (unrotated + value), parts };
        let norm = |params: &mut ParamBuilder, part: &str, features| {
            Norm::new(params, &format!("{name}.{part}"), features, NormKind::Rms, norm_eps)
        };
        let down = ReplicatedLinear::new(params, hidden, &down, input)?;
        let q_norm = match config.q_lora_rank {
            Some(rank) => Some(norm(params, "q_a_layernorm", rank)?),
            None => None,
        };
        let q = ColumnParallelLinear::new(params, q_inputs, &[q], linear(input))?;
        let kv_norm = norm(params, "kv_a_layernorm", kv_lora_rank)?;
        let kv = ColumnParallelLinear::new(params, kv_lora_rank, &[kv], linear(input))?;
        let out = RowParallelLinear::new(params, &named("o_proj"), heads * value, hidden, linear(config.output))?;
        let q_latent = config.q_lora_rank.unwrap_or(0);
        Ok(Self {
            down,
            q_norm,
            q,
            kv_norm,
            kv,
            out,
            sizes: Sizes { q_latent, kv_latent: kv_lora_rank, rotated, unrotated, value, heads: heads / parts },
            options: AttentionOptions { scale: config.scale, ..AttentionOptions::causal(rotated + unrotated) },
            parallel: params.parallel().clone(),
            recompute_core: params.recompute().selects(recompute::Module::CoreAttention),
        })
    }

    /// Attention of `norm(x)`: `[s, b, hidden]` to the same, or the rank's parts of the sequence to the same. `angles`
    /// rotate queries and the shared key.
    pub fn forward(&self, x: impl Into<Residual>, norm: &Norm, angles: &Angles, batch: &MicroBatch) -> Tensor<3> {
        let [q, k, v] = self.heads(self.projected(x.into(), norm, batch), angles);
        let options = AttentionOptions { deterministic: batch.pass.deterministic, ..self.options };
        batch.note_attention_logits(q.clone(), k.clone(), options);
        if self.recompute_core {
            let (context, documents) = (batch.context.clone(), batch.documents.clone());
            let attention = Prologue::SeparateAttention { k, v, options, context, documents };
            return self.out.forward(q, attention, true, batch);
        }
        let (context, documents) = (batch.context.as_ref(), batch.documents.as_ref());
        self.finish(attention_over_context(q, k, v, options, context, documents, &batch.pass), batch)
    }

    /// The same for tokens of several sequences, one after the other, whose earlier positions are in the cache as
    /// `layer`'s: of each the rotated key and the normalised latent, the same on all tensor-parallel ranks.
    pub fn extend(
        &self,
        x: impl Into<Residual>,
        norm: &Norm,
        step: &Step,
        angles: &Angles,
        (layer, cache): (usize, &mut PagedKvCache),
    ) -> Tensor<3> {
        let (batch, tokens) = (&MicroBatch::default(), step.len());
        let Sizes { kv_latent, rotated, unrotated, value, heads, .. } = self.sizes;
        let [q, latent, shared] = self.down(x.into(), norm, batch);
        let positions = q.dims()[0];
        let q = rotate(q.narrow(0, 0, tokens).reshape([tokens, 1, heads, rotated + unrotated]), heads, angles);
        let rows = Tensor::cat(vec![shared, self.kv_norm.forward(latent)], 2);
        let rows = enter_tensor_parallel(rows, &self.parallel).narrow(0, 0, tokens);
        let rows = rotate(rows.reshape([tokens, 1, 1, rotated + kv_latent]), 1, angles);
        let of = LatentHeads { up: self.kv.whole_weight(), heads, rotated, unrotated, value };
        let of = cache.attend_latents(layer, step, [q, rows], &of, self.options);
        self.finish(pad_sequence(of, positions), batch)
    }

    /// The rank's query heads, its key and value heads, and the shared key, each `[s, b, features]`, before rotation.
    fn projected(&self, x: Residual, norm: &Norm, batch: &MicroBatch) -> [Tensor<3>; 3] {
        let [q, kv, shared] = self.down(x, norm, batch);
        // Every rank uses the shared key for its own heads: its gradient is a sum over the ranks.
        [q, self.kv.forward(kv, &self.kv_norm, batch), enter_tensor_parallel(shared, &self.parallel)]
    }

    /// The rank's query heads of all positions, and of its own positions the latent of keys and values and the shared key.
    fn down(&self, x: Residual, norm: &Norm, batch: &MicroBatch) -> [Tensor<3>; 3] {
        let Sizes { q_latent, kv_latent, rotated, .. } = self.sizes;
        let latents = self.down.forward(x.clone(), norm, batch);
        match &self.q_norm {
            Some(q_norm) => {
                let [q, kv, shared] = split(latents, [q_latent, kv_latent, rotated]);
                [self.q.forward(q, q_norm, batch), kv, shared]
            }
            None => {
                let [kv, shared] = split(latents, [kv_latent, rotated]);
                [self.q.forward(x, norm, batch), kv, shared]
            }
        }
    }

    /// Rotated queries and keys `[s, b, heads, rotated + unrotated]`, and values `[s, b, heads, value]`.
    fn heads(&self, [q, kv, shared]: [Tensor<3>; 3], angles: &Angles) -> [Tensor<4>; 3] {
        let Sizes { rotated, unrotated, value, heads, .. } = self.sizes;
        let [seq, batch, _] = q.dims();
        let q = rotate(q.reshape([seq, batch, heads, rotated + unrotated]), heads, angles);
        let kv = kv.reshape([seq, batch, heads, unrotated + value]);
        let [k, v] = latent_keys(kv, shared, [angles.cos.clone(), angles.sin.clone()], unrotated);
        [q, k, v]
    }

    fn finish(&self, context: Tensor<4>, batch: &MicroBatch) -> Tensor<3> {
        let [seq, samples, heads, value] = context.dims();
        self.out.forward(context.reshape([seq, samples, heads * value]), Prologue::None, false, batch)
    }
}
