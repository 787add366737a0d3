//! The sizes of a decoder, and those of one rank.

mod states;

pub use states::{Linear, StateSpace};

use backend_dist::mesh::ParallelLayout;
use models::layers::{NormOver, NormPlacement};

use crate::flops::{AttentionCount, FlopShape, LatentFlops, LinearFlops};
use crate::schedule::stages::PartCosts;

/// Routed experts of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Experts {
    /// Number of routed experts.
    pub count: usize,
    /// Experts per token (top-k).
    pub top_k: usize,
    /// Experts and router have biases.
    pub biases: bool,
    /// Intermediate size of an expert. Experts are gated.
    pub intermediate: usize,
    /// Intermediate size of the shared experts, which all tokens use; 0 without any.
    pub shared: usize,
    /// The shared experts' output is gated by a function of the token.
    pub shared_gate: bool,
    /// Layers with a dense MLP instead of experts.
    pub dense_layers: Vec<usize>,
}

/// Sizes of multi-head latent attention (MLA), per token or per head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latent {
    /// Rank of the query latent; without one queries are projected from the hidden states.
    pub queries: Option<usize>,
    /// Rank of the key-value latent.
    pub keys: usize,
    /// Query and key head dimension with RoPE; all heads share this part of the key.
    pub rotated: usize,
    /// Query and key head dimension without RoPE.
    pub unrotated: usize,
    /// Value head dimension.
    pub value: usize,
}

/// The sizes that memory, traffic and time follow from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decoder {
    /// Vocabulary size.
    pub vocab: usize,
    /// The vocabulary shard of every rank is padded to a multiple of this.
    pub vocab_multiple: usize,
    /// Hidden size.
    pub hidden: usize,
    /// Intermediate size of the MLP.
    pub intermediate: usize,
    /// Experts of an MoE model.
    pub experts: Option<Experts>,
    /// Number of transformer layers.
    pub layers: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key-value heads.
    pub kv_heads: usize,
    /// Head dimension.
    pub head_dim: usize,
    /// Sizes of latent attention, if the model has it.
    pub latent: Option<Latent>,
    /// Layers with linear attention, if there are such.
    pub linear: Option<Linear>,
    /// Sizes of the layers, if they are Mamba-2's.
    pub mamba: Option<StateSpace>,
    /// Number of multi-token prediction modules, each with a transformer layer of its own after the last one.
    pub mtp: usize,
    /// Size of the sliding attention window, if the model has one.
    pub window: Option<usize>,
    /// Layers with the window; without one nothing.
    pub windowed_layers: usize,
    /// The MLP is `down(silu(gate) up)`, with three matrices instead of two.
    pub gated: bool,
    /// Over what queries and keys are normalised, if they are.
    pub query_key_norm: Option<NormOver>,
    /// Where the norms of a layer are.
    pub norms: NormPlacement,
    /// Norms have a bias.
    pub norm_bias: bool,
    /// Attention scores have a soft cap, which no GPU kernel has.
    pub softcap: bool,
    /// Each query head has an attention sink.
    pub sinks: bool,
    /// Attention's output has a gate as wide as the queries.
    pub output_gate: bool,
    /// The projection of queries, keys and values has biases, and the output projection.
    pub attention_bias: [bool; 2],
    /// The MLP's linear layers have biases.
    pub mlp_bias: bool,
    /// Number of learned position embeddings; without them the model uses RoPE.
    pub positions: Option<usize>,
    /// The output layer shares the embedding's weight.
    pub tied: bool,
}

/// One rank's sizes of a decoder and a micro-batch, in elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LocalSizes {
    /// Tokens of a micro-batch inside tensor-parallel regions.
    pub tokens: u64,
    /// Tokens outside of tensor-parallel regions: fewer under sequence parallelism.
    pub stream_tokens: u64,
    /// Hidden size.
    pub hidden: u64,
    /// Features of the local query heads.
    pub queries: u64,
    /// Features of the local key heads, and of the local value heads.
    pub keys: u64,
    /// Number of local query heads.
    pub heads: u64,
    /// Local intermediate size of the MLP.
    pub intermediate: u64,
    /// Size of the local shard of the padded vocabulary.
    pub vocab: u64,
    /// Keys visible to a query, on average over the sequence.
    pub visible: f64,
    /// Sizes of the local experts; zeros in a dense model.
    pub experts: LocalExperts,
}

/// One rank's sizes of a layer's experts under perfect load balance, in elements.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LocalExperts {
    /// Tokens that the rank dispatches.
    pub tokens: u64,
    /// Copies of these tokens, one for each expert of a token.
    pub copies: u64,
    /// Token copies that the local experts compute.
    pub rows: u64,
    /// Number of local experts, or shards of experts.
    pub count: u64,
    /// Local intermediate size of an expert.
    pub intermediate: u64,
    /// Local intermediate size of the shared experts.
    pub shared: u64,
}

/// Layers of the same kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerKind {
    /// The first layer of the kind.
    pub example: usize,
    /// Number of layers.
    pub count: usize,
    /// The layers have experts.
    pub moe: bool,
    /// The layers have linear attention or Mamba-2.
    pub linear: bool,
}

impl Decoder {
    /// The sizes that FLOPs are counted from.
    pub fn flop_shape(&self, seq: usize) -> FlopShape {
        let (kinds, experts) = (self.layer_kinds(), self.experts.as_ref());
        let layers = |moe: bool| kinds.iter().filter(|kind| kind.moe == moe).map(|kind| kind.count).sum::<usize>();
        let linear_layers = kinds.iter().filter(|kind| kind.linear).map(|kind| kind.count).sum();
        FlopShape {
            dense_layers: layers(false) + if experts.is_some() { 0 } else { self.mtp },
            moe_layers: layers(true) + if experts.is_some() { self.mtp } else { 0 },
            hidden: self.hidden,
            query_width: self.heads * self.head_dim,
            kv_width: self.kv_heads * self.head_dim,
            latent: self.latent.map(|latent| LatentFlops {
                queries: latent.queries,
                keys: latent.keys,
                shared: latent.rotated,
                values: self.heads * latent.value,
                up: self.heads * (latent.unrotated + latent.value),
            }),
            linear: match (&self.linear, &self.mamba) {
                (Some(linear), _) => Some(linear.flops(self.hidden, linear_layers)),
                (None, mamba) => mamba.map(|mamba| mamba.flops(self.hidden, linear_layers)),
            },
            output_gate: self.output_gate,
            mtp: self.mtp,
            ffn: self.intermediate,
            expert_ffn: experts.map_or(0, |experts| experts.intermediate),
            top_k: experts.map_or(0, |experts| experts.top_k),
            shared_ffn: experts.map_or(0, |experts| experts.shared),
            gated: self.gated,
            padded_vocab: self.vocab.next_multiple_of(self.vocab_multiple.max(1)),
            seq,
            frozen: false,
        }
    }

    /// FLOPs of a token in each layer and after the last one.
    pub fn part_costs(&self, seq: usize) -> PartCosts {
        let nothing = FlopShape { dense_layers: 0, moe_layers: 0, mtp: 0, padded_vocab: 0, ..self.flop_shape(seq) };
        let of = |shape: FlopShape| shape.per_token(AttentionCount::Causal);
        let layer = |at: usize| {
            let (moe, is_linear) = (self.experts_of(at).is_some(), self.has_state(at));
            let linear = nothing.linear.map(|linear| LinearFlops { layers: usize::from(is_linear), ..linear });
            of(FlopShape { dense_layers: usize::from(!moe), moe_layers: usize::from(moe), linear, ..nothing })
        };
        let layers: Vec<f64> = (0..self.layers).map(layer).collect();
        let end = of(self.flop_shape(seq)) - layers.iter().sum::<f64>();
        PartCosts { layers, end }
    }

    /// The experts of a layer, counted over the whole model, if it has any.
    pub fn experts_of(&self, layer: usize) -> Option<&Experts> {
        self.experts.as_ref().filter(|experts| !experts.dense_layers.contains(&layer))
    }

    /// The linear attention of a layer, counted over the whole model, if it has one.
    pub fn linear_of(&self, layer: usize) -> Option<&Linear> {
        self.linear.as_ref().filter(|linear| linear.layers.contains(&layer))
    }

    /// Whether a layer has keys and values of every position.
    pub fn has_keys(&self, layer: usize) -> bool {
        !self.has_state(layer)
    }

    fn has_state(&self, layer: usize) -> bool {
        self.mamba.is_some() || self.linear_of(layer).is_some()
    }

    /// Whether the stage of the head uses the embedding's table too, and holds a copy if it is another stage.
    pub fn shares_table(&self) -> bool {
        self.tied || self.mtp > 0
    }

    /// The kinds of layers of the model.
    pub fn layer_kinds(&self) -> Vec<LayerKind> {
        let of = |layer: usize| (self.experts_of(layer).is_some(), self.has_state(layer));
        let kind = |(moe, linear)| {
            let mut all = (0..self.layers).filter(|layer| of(*layer) == (moe, linear));
            let example = all.next()?;
            Some(LayerKind { example, count: 1 + all.count(), moe, linear })
        };
        [(false, false), (false, true), (true, false), (true, true)].into_iter().filter_map(kind).collect()
    }

    /// One rank's sizes in a micro-batch of `sequences` sequences of `seq` tokens, in documents of `documents` tokens.
    pub fn local(&self, layout: &ParallelLayout, sequences: usize, seq: usize, documents: usize) -> LocalSizes {
        let tp = layout.tp;
        let tokens = (sequences * seq).div_ceil(layout.cp);
        let visible = |seen: usize| seen as f64 - (seen * seen) as f64 / (2 * documents.max(1)) as f64;
        let (window, layers) = (self.window.unwrap_or(documents).min(documents), self.layers.max(1) as f64);
        let share = self.windowed_layers as f64 / layers;
        let experts = self.experts.as_ref().map_or(LocalExperts::default(), |experts| {
            let (own, etp) = (tokens.div_ceil(tp) as u64, layout.expert_tp());
            let copies = own * experts.top_k as u64;
            LocalExperts {
                tokens: own,
                copies,
                rows: copies * etp as u64,
                count: (experts.count / layout.ep) as u64,
                intermediate: (experts.intermediate / etp) as u64,
                shared: (experts.shared / tp) as u64,
            }
        });
        LocalSizes {
            tokens: tokens as u64,
            stream_tokens: tokens.div_ceil(if layout.sequence_parallel() { tp } else { 1 }) as u64,
            hidden: self.hidden as u64,
            queries: (self.heads / tp * self.head_dim) as u64,
            keys: (self.kv_heads / tp.min(self.kv_heads) * self.head_dim) as u64,
            heads: (self.heads / tp) as u64,
            intermediate: (self.intermediate / tp) as u64,
            vocab: (self.vocab.next_multiple_of(self.vocab_multiple.max(1) * tp) / tp) as u64,
            visible: share * visible(window) + (1.0 - share) * visible(documents),
            experts,
        }
    }
}
