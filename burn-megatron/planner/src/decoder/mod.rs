//! The sizes of a decoder, and those of one rank.

mod kinds;
mod states;

pub use kinds::LayerKind;
pub use states::{Linear, StateSpace};

use layouts::mesh::ParallelLayout;

use host::flops::{AttentionCount, FlopShape, LatentFlops, LinearFlops};
use host::schedule::stages::PartCosts;

/// Routed experts of a layer. The default has none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Experts {
    /// Number of routed experts.
    pub count: usize,
    /// Experts per token (top-k).
    pub top_k: usize,
    /// Experts and router have biases.
    pub biases: bool,
    /// Intermediate size of an expert.
    pub intermediate: usize,
    /// Intermediate size of the shared experts, which all tokens use; 0 without any.
    pub shared: usize,
    /// The shared experts' output is gated by a function of the token.
    pub shared_gate: bool,
    /// Layers without experts: with a dense MLP instead, or without either.
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

/// The sizes that memory, traffic and time follow from. The default has none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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
    /// Layers of Mamba-2, if there are such.
    pub mamba: Option<StateSpace>,
    /// Layers that are an MLP alone, where each layer is one part alone (Mamba-2, Nemotron-H); elsewhere every layer has
    /// attention, or what is in its place, and an MLP or experts.
    pub lone_mlps: Option<Vec<usize>>,
    /// Number of multi-token prediction modules, each with a transformer layer of its own after the last one.
    pub mtp: usize,
    /// Size of the sliding attention window, if the model has one.
    pub window: Option<usize>,
    /// Layers with the window; without one nothing.
    pub windowed_layers: usize,
    /// The MLP and each expert are `down(silu(gate) up)`, with three matrices instead of two.
    pub gated: bool,
    /// Queries and keys are normalised head by head, with one weight for all heads.
    pub head_norm: bool,
    /// The queries of all heads are normalised together, and the keys.
    pub projection_norm: bool,
    /// Attention and MLP have a norm before them, and one after them.
    pub norms: [bool; 2],
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
    /// Number of learned position embeddings.
    pub positions: Option<usize>,
    /// Attention has RoPE.
    pub rope: bool,
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

impl Decoder {
    /// The sizes that FLOPs are counted from.
    pub fn flop_shape(&self, seq: usize) -> FlopShape {
        let (kinds, experts) = (self.layer_kinds(), self.experts.as_ref());
        let layers = |of: fn(&LayerKind) -> bool| kinds.iter().filter(|kind| of(kind)).map(|kind| kind.count).sum();
        let (dense, moe, linear): (usize, usize, usize) =
            (layers(|kind| kind.mlp && !kind.moe), layers(|kind| kind.moe), layers(|kind| kind.linear));
        FlopShape {
            dense_layers: dense + if experts.is_some() { 0 } else { self.mtp },
            moe_layers: moe + if experts.is_some() { self.mtp } else { 0 },
            attention_layers: layers(|kind| kind.attention) + self.mtp,
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
                (Some(of), _) => Some(of.flops(self.hidden, linear)),
                (None, of) => of.as_ref().map(|of| of.flops(self.hidden, linear)),
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
        let (dense_layers, moe_layers, attention_layers, mtp, padded_vocab) = (0, 0, 0, 0, 0);
        let whole = self.flop_shape(seq);
        let nothing = FlopShape { dense_layers, moe_layers, attention_layers, mtp, padded_vocab, ..whole };
        let of = |shape: FlopShape| shape.per_token(AttentionCount::Causal);
        let layer = |at: usize| {
            let moe = self.experts_of(at).is_some();
            let linear = nothing.linear.map(|linear| LinearFlops { layers: usize::from(self.has_state(at)), ..linear });
            let dense_layers = usize::from(self.has_mlp(at) && !moe);
            let (moe_layers, attention_layers) = (usize::from(moe), usize::from(self.has_keys(at)));
            of(FlopShape { dense_layers, moe_layers, attention_layers, linear, ..nothing })
        };
        let layers: Vec<f64> = (0..self.layers).map(layer).collect();
        let end = of(whole) - layers.iter().sum::<f64>();
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

    /// The Mamba-2 of a layer, counted over the whole model, if it is one.
    pub fn mamba_of(&self, layer: usize) -> Option<&StateSpace> {
        self.mamba.as_ref().filter(|mamba| mamba.layers.contains(&layer))
    }

    /// Whether every layer is attention and an MLP.
    pub fn is_dense(&self) -> bool {
        let others = self.linear.is_some() || self.mamba.is_some() || self.latent.is_some() || self.lone_mlps.is_some();
        self.experts.is_none() && !others
    }

    /// Whether a layer has keys and values of every position.
    pub fn has_keys(&self, layer: usize) -> bool {
        self.has_mixer(layer) && !self.has_state(layer)
    }

    /// Whether a layer has attention, or what is in its place.
    pub fn has_mixer(&self, layer: usize) -> bool {
        !self.lone_mlps.as_ref().is_some_and(|mlps| mlps.contains(&layer))
    }

    /// Whether a layer has an MLP or experts.
    pub fn has_mlp(&self, layer: usize) -> bool {
        self.lone_mlps.as_ref().is_none_or(|mlps| mlps.contains(&layer))
    }

    fn has_state(&self, layer: usize) -> bool {
        self.mamba_of(layer).is_some() || self.linear_of(layer).is_some()
    }

    /// Whether the stage of the head uses the embedding's table too, and holds a copy if it is another stage.
    pub fn shares_table(&self) -> bool {
        self.tied || self.mtp > 0
    }

    /// One rank's sizes in a micro-batch of `sequences` sequences of `seq` tokens, in documents of `documents` tokens.
    pub fn local(&self, layout: &ParallelLayout, sequences: usize, seq: usize, documents: usize) -> LocalSizes {
        let tp = layout.tp;
        let tokens = (sequences * seq).div_ceil(layout.cp);
        let visible = |seen: usize| seen as f64 - (seen as f64).powi(2) / (2.0 * documents.max(1) as f64);
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
