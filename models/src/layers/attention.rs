//! Causal self-attention with grouped queries; every rank has some of the heads.

use backend_dist::ops::context::{attention_in_context, attention_packed_with_sinks};
use backend_dist::ops::{AttentionOptions, PackedHeads, Prologue, Residual};
use backend_dist::shard::{Init, Section, stable_hash};
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn::tensor::activation::sigmoid;

use super::frequencies::RopeConfig;
use super::linear::{ColumnParallelLinear, LinearConfig, Output, pad_sequence};
use super::norm::Norm;
use super::paged::{Decode, PagedKvCache, Step};
use super::query_key_norm::{QueryKeyNorm, QueryKeyNorms};
use super::rope::{Angles, rotate};
use super::row_linear::{RowParallelLinear, Summand};
use super::weight_dropout::WeightDropout;
use crate::micro_batch::MicroBatch;
use crate::param::{ParamBuilder, Result};
use crate::recompute;

/// Sizes of an attention layer.
#[derive(Clone, Copy, Debug)]
pub struct AttentionConfig {
    /// Features in and out.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key-value heads; each serves `heads / kv_heads` query heads.
    pub kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Rotation of queries and keys; without it positions must be in the layer's input, or nowhere (SmolLM3).
    pub rope: Option<RopeConfig>,
    /// A position sees itself and this many minus one before it; `None` is all of them.
    pub window: Option<usize>,
    /// Factor of the scores; `None` is `1/√head_dim`.
    pub scale: Option<f64>,
    /// A scaled score `s` becomes `c tanh(s/c)` (Gemma 2).
    pub softcap: Option<f64>,
    /// The softmax of each query head has one more score, a learned one whose value is zero (gpt-oss).
    pub sinks: bool,
    /// The output is multiplied by the sigmoid of a further projection of the input, feature by feature (Qwen3-Next).
    pub output_gate: bool,
    /// Share of the attention weights dropped after the softmax.
    pub dropout: f64,
    /// Norms of queries and keys.
    pub query_key_norm: Option<QueryKeyNorm>,
    /// The query, key and value projection.
    pub input: LinearConfig,
    /// The projection that is added to the residual stream.
    pub output: LinearConfig,
}

impl AttentionConfig {
    /// Full causal attention of `heads` query and key-value heads, without rotation, norms and dropout.
    pub fn new(hidden: usize, heads: [usize; 2], head_dim: usize, [input, output]: [LinearConfig; 2]) -> Self {
        let [heads, kv_heads] = heads;
        let (rope, window, scale, softcap, query_key_norm) = (None, None, None, None, None);
        Self {
            hidden,
            heads,
            kv_heads,
            head_dim,
            rope,
            window,
            scale,
            softcap,
            sinks: false,
            output_gate: false,
            dropout: 0.0,
            query_key_norm,
            input,
            output,
        }
    }

    fn options(&self) -> AttentionOptions {
        let causal = AttentionOptions::causal(self.head_dim);
        let scale = self.scale.unwrap_or(causal.scale);
        AttentionOptions { scale, window: self.window, softcap: self.softcap, ..causal }
    }
}

/// Self-attention. A rank holds its query heads and the key-value heads they use; with fewer key-value
/// heads than ranks, neighbours hold the same key-value head.
#[derive(Module, Debug)]
pub struct SelfAttention {
    /// With an output gate its projection follows the values.
    qkv: ColumnParallelLinear,
    norms: Option<QueryKeyNorms>,
    /// Of the rank's query heads.
    sinks: Option<Param<Tensor<1>>>,
    out: RowParallelLinear,
    #[module(skip)]
    heads: PackedHeads,
    #[module(skip)]
    options: AttentionOptions,
    #[module(skip)]
    dropout: WeightDropout,
    #[module(skip)]
    recompute_core: bool,
    output_gate: bool,
}

impl SelfAttention {
    /// An attention layer under the global name `name`.
    pub fn new(params: &mut ParamBuilder, name: &str, config: &AttentionConfig) -> Result<Self> {
        let ranks = params.place().size;
        let kv_parts = ranks.min(config.kv_heads);
        let [q, k, v, gate] = ["q", "k", "v", "gate"].map(|part| format!("{name}.{part}_proj"));
        let kv_features = config.kv_heads * config.head_dim;
        let outputs = [
            Output { name: &q, features: config.heads * config.head_dim, parts: ranks },
            Output { name: &k, features: kv_features, parts: kv_parts },
            Output { name: &v, features: kv_features, parts: kv_parts },
            Output { name: &gate, features: config.heads * config.head_dim, parts: ranks },
        ];
        let outputs = &outputs[..if config.output_gate { 4 } else { 3 }];
        let inner = config.heads * config.head_dim;
        let qkv = ColumnParallelLinear::new(params, config.hidden, outputs, config.input)?;
        let heads = PackedHeads { heads: config.heads, kv_heads: config.kv_heads };
        let norms = |norm| QueryKeyNorms::new(params, name, (heads, config.head_dim), norm);
        let norms = config.query_key_norm.map(norms).transpose()?;
        let sinks = match config.sinks {
            true => {
                let section = Section::split(format!("{name}.sinks"), &[config.heads], 0, ranks, params.place());
                Some(params.sections(vec![(section, Init::ZEROS)])?)
            }
            false => None,
        };
        Ok(Self {
            qkv,
            norms,
            sinks,
            out: RowParallelLinear::new(params, &format!("{name}.o_proj"), inner, config.hidden, config.output)?,
            heads: PackedHeads { heads: config.heads / ranks, kv_heads: config.kv_heads / kv_parts },
            options: config.options(),
            dropout: WeightDropout {
                share: config.dropout,
                stream: stable_hash(&format!("{name}.weights")),
                first_head: params.place().rank * config.heads / ranks,
                heads: config.heads,
            },
            recompute_core: params.recompute().selects(recompute::Module::CoreAttention),
            output_gate: config.output_gate,
        })
    }

    /// Attention of `norm(x)`: `[s, b, hidden]` to the same, or the rank's parts of the sequence to the same. `angles`
    /// rotate queries and keys; without them positions must be in `x`.
    pub fn forward(
        &self,
        x: impl Into<Residual>,
        norm: &Norm,
        angles: Option<&Angles>,
        batch: &MicroBatch,
    ) -> Tensor<3> {
        let (qkv, gate) = self.gate(self.qkv.forward(x, norm, batch));
        let qkv = self.heads(qkv, angles);
        let (dropout, deterministic) = (self.dropout.with(batch.dropout.as_ref()), batch.pass.deterministic);
        let options = AttentionOptions { dropout, deterministic, ..self.options };
        if batch.attention_logits.is_some() {
            let [q, k, _] = self.split(qkv.clone());
            batch.note_attention_logits(q, k, options);
        }
        let (context, documents) = (batch.context.as_ref(), batch.documents.as_ref());
        if let Some(sinks) = &self.sinks {
            let sinks = sinks.val();
            let of = attention_packed_with_sinks(qkv, self.heads, sinks, options, context, documents, &batch.pass);
            return self.out.forward(side_by_side(of), Prologue::None, false, batch);
        }
        if gate.is_none() && context.is_none() && documents.is_none() {
            return self.out.forward(qkv, Prologue::Attention(self.heads, options), self.recompute_core, batch);
        }
        if gate.is_none() && self.recompute_core {
            let (context, documents) = (batch.context.clone(), batch.documents.clone());
            let attention = Prologue::AttentionInContext(self.heads, options, context, documents);
            return self.out.forward(qkv, attention, true, batch);
        }
        let of = attention_in_context(qkv, self.heads, options, context, documents, &batch.pass);
        self.out.forward(gated(side_by_side(of), gate), Prologue::None, false, batch)
    }

    /// The same for tokens of several sequences, one after the other, whose earlier positions are in the cache as
    /// `layer`'s.
    pub fn extend(
        &self,
        x: impl Into<Residual>,
        norm: &Norm,
        step: &Step,
        angles: Option<&Angles>,
        (layer, cache): (usize, &mut PagedKvCache),
    ) -> Tensor<3> {
        let batch = &MicroBatch::default();
        let (qkv, gate) = self.gate(self.qkv.forward(x, norm, batch));
        let positions = qkv.dims()[0];
        let qkv = self.split(self.heads(qkv.narrow(0, 0, step.len()), angles));
        let of = cache.attend(layer, step, qkv, self.options, self.sinks.as_ref().map(Param::val));
        let of = gated(side_by_side(pad_sequence(of, positions)), gate);
        self.out.forward(of, Prologue::None, false, batch)
    }

    /// The same for a decode step on a GPU, as whose layer `layer`'s keys and values are in the cache.
    pub(crate) fn decode(
        &self,
        x: Residual,
        norm: &Norm,
        (layer, step): (usize, &Decode),
        angles: Option<&Angles>,
    ) -> Summand {
        let batch = &MicroBatch::default();
        let qkv = self.heads(self.qkv.forward(x, norm, batch), None);
        let of = step.attend(layer, qkv, angles, (self.heads, self.options));
        self.out.summand(side_by_side(of), Prologue::None)
    }

    /// The weight that a decode step reads first.
    pub(crate) fn first_weight(&self) -> Option<Tensor<2>> {
        self.qkv.weight_in_memory()
    }

    /// Whether decode steps have a kernel: on GPUs, without sinks, output gates and softcaps.
    pub(crate) fn decodes(&self, layer: usize, cache: &PagedKvCache) -> bool {
        self.sinks.is_none() && !self.output_gate && cache.has_kernel(layer, (self.heads, self.options))
    }

    /// Queries, keys and values of packed heads.
    fn split(&self, qkv: Tensor<4>) -> [Tensor<4>; 3] {
        let PackedHeads { heads, kv_heads } = self.heads;
        [(0, heads), (heads, kv_heads), (heads + kv_heads, kv_heads)]
            .map(|(first, count)| qkv.clone().narrow(2, first, count))
    }

    /// The projection's queries, keys and values, and the output's gate if there is one.
    fn gate(&self, projected: Tensor<3>) -> (Tensor<3>, Option<Tensor<3>>) {
        if !self.output_gate {
            return (projected, None);
        }
        let PackedHeads { heads, .. } = self.heads;
        let features = projected.dims()[2];
        let queries = features / (self.heads.total() + heads) * heads;
        let rest = features - queries;
        (projected.clone().narrow(2, 0, rest), Some(projected.narrow(2, rest, queries)))
    }

    /// The projection's `[s, b, features]` as normalised and rotated heads `[s, b, heads + 2 kv_heads, d]`.
    fn heads(&self, qkv: Tensor<3>, angles: Option<&Angles>) -> Tensor<4> {
        let [seq, batch, features] = qkv.dims();
        let PackedHeads { heads, kv_heads } = self.heads;
        let head_dim = features / self.heads.total();
        let shape = [seq, batch, self.heads.total(), head_dim];
        let qkv = match &self.norms {
            Some(QueryKeyNorms::Heads(norms)) => Norm::heads(norms, qkv.reshape(shape), self.heads),
            Some(QueryKeyNorms::Projections([of_queries, of_keys])) => {
                let part = |first: usize, heads: usize| qkv.clone().narrow(2, first * head_dim, heads * head_dim);
                let (q, k) = (of_queries.forward(part(0, heads)), of_keys.forward(part(heads, kv_heads)));
                Tensor::cat(vec![q, k, part(heads + kv_heads, kv_heads)], 2).reshape(shape)
            }
            None => qkv.reshape(shape),
        };
        match angles {
            Some(angles) => rotate(qkv, heads + kv_heads, angles),
            None => qkv,
        }
    }
}

/// The output behind its gate, if it has one.
fn gated(of: Tensor<3>, gate: Option<Tensor<3>>) -> Tensor<3> {
    match gate {
        Some(gate) => of * sigmoid(gate),
        None => of,
    }
}

/// `[s, b, heads, d]` as `[s, b, heads d]`.
fn side_by_side(x: Tensor<4>) -> Tensor<3> {
    let [seq, batch, heads, head_dim] = x.dims();
    x.reshape([seq, batch, heads * head_dim])
}
