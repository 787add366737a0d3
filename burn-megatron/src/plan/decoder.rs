//! The sizes of a decoder, and a rank's share of them.

use backend_dist::mesh::ParallelLayout;

use crate::flops::{AttentionCount, FlopShape, LatentFlops};
use crate::schedule::stages::PartCosts;

/// Experts in the place of MLPs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Experts {
    /// Experts of a layer.
    pub count: usize,
    /// Experts that a token uses.
    pub top_k: usize,
    /// Width of one. They are gated and have no biases.
    pub intermediate: usize,
    /// Width of the MLP beside them that all tokens use; 0 without one.
    pub shared: usize,
    /// Layers that have an MLP instead.
    pub dense_layers: Vec<usize>,
}

/// Latents in the place of whole keys and values: features of each token, or of each head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latent {
    /// Of the latent that queries come from; without one they come from the hidden states.
    pub queries: Option<usize>,
    /// Of the latent that keys and values come from.
    pub keys: usize,
    /// Of a query head that are rotated, and of the key that all heads share.
    pub rotated: usize,
    /// Of a query and key head that are not.
    pub unrotated: usize,
    /// Of a value head.
    pub value: usize,
}

/// The sizes that memory, traffic and time follow from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decoder {
    /// Number of tokens.
    pub vocab: usize,
    /// Every rank's rows of the vocabulary are a multiple of this.
    pub vocab_multiple: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    /// What layers have in its place, in a mixture of experts.
    pub experts: Option<Experts>,
    /// Transformer layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Queries, keys and values come from latents.
    pub latent: Option<Latent>,
    /// Modules of multi-token prediction, each with a layer of its own, behind the last one.
    pub mtp: usize,
    /// Positions that one sees, if not all before it.
    pub window: Option<usize>,
    /// The MLP is `down(silu(gate) up)`, with three matrices instead of two.
    pub gated: bool,
    /// Queries and keys are normalised head by head.
    pub head_norms: bool,
    /// Norms have a bias.
    pub norm_bias: bool,
    /// The attention's linear layers have biases.
    pub attention_bias: bool,
    /// The MLP's linear layers have biases.
    pub mlp_bias: bool,
    /// Learned positions; without them queries and keys are rotated.
    pub positions: Option<usize>,
    /// The output layer shares the embedding's weight.
    pub tied: bool,
}

/// What one rank has of a decoder, and of a micro-batch: numbers of elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share {
    /// Tokens of a micro-batch inside tensor parallel regions.
    pub tokens: u64,
    /// Tokens between them: fewer under sequence parallelism.
    pub stream_tokens: u64,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Features of the rank's query heads.
    pub queries: u64,
    /// Features of its key heads, and of its value heads.
    pub keys: u64,
    /// Its query heads.
    pub heads: u64,
    /// Features of its part of the MLP.
    pub intermediate: u64,
    /// Its rows of the padded vocabulary.
    pub vocab: u64,
    /// Keys that a query sees, on average over the sequence.
    pub visible: f64,
    /// What it has of the experts; nothing in a dense model.
    pub experts: ExpertShare,
}

/// What one rank has of a layer's experts, if each is used alike: numbers of elements.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ExpertShare {
    /// Tokens that it sends to their experts.
    pub tokens: u64,
    /// Copies of them, one for each expert that a token uses.
    pub copies: u64,
    /// Copies that its experts compute.
    pub rows: u64,
    /// Its experts, or parts of experts.
    pub count: u64,
    /// Features of its part of one.
    pub intermediate: u64,
    /// Features of its part of the shared ones.
    pub shared: u64,
}

/// Layers that are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerKind {
    /// The first of them.
    pub example: usize,
    /// How many there are.
    pub count: usize,
    /// They have experts.
    pub moe: bool,
}

impl Decoder {
    /// What the count of FLOPs needs to know.
    pub fn flop_shape(&self, seq: usize) -> FlopShape {
        let (kinds, experts) = (self.layer_kinds(), self.experts.as_ref());
        let layers = |moe: bool| kinds.iter().filter(|kind| kind.moe == moe).map(|kind| kind.count).sum::<usize>();
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
            mtp: self.mtp,
            ffn: self.intermediate,
            expert_ffn: experts.map_or(0, |experts| experts.intermediate),
            top_k: experts.map_or(0, |experts| experts.top_k),
            shared_ffn: experts.map_or(0, |experts| experts.shared),
            gated: self.gated,
            padded_vocab: self.vocab.next_multiple_of(self.vocab_multiple.max(1)),
            seq,
        }
    }

    /// FLOPs of a token in each layer and behind the last one.
    pub fn part_costs(&self, seq: usize) -> PartCosts {
        let nothing = FlopShape { dense_layers: 0, moe_layers: 0, mtp: 0, padded_vocab: 0, ..self.flop_shape(seq) };
        let of = |shape: FlopShape| shape.per_token(AttentionCount::Causal);
        let layer =
            |moe: bool| of(FlopShape { dense_layers: usize::from(!moe), moe_layers: usize::from(moe), ..nothing });
        let layers: Vec<f64> = (0..self.layers).map(|at| layer(self.experts_of(at).is_some())).collect();
        let end = of(self.flop_shape(seq)) - layers.iter().sum::<f64>();
        PartCosts { layers, end }
    }

    /// The experts of a layer, counted over the whole model, if it has any.
    pub fn experts_of(&self, layer: usize) -> Option<&Experts> {
        self.experts.as_ref().filter(|experts| !experts.dense_layers.contains(&layer))
    }

    /// Whether the embedding's table is used on the head's stage too, which holds a copy of it if need be.
    pub fn shares_table(&self) -> bool {
        self.tied || self.mtp > 0
    }

    /// The kinds of layers that there are.
    pub fn layer_kinds(&self) -> Vec<LayerKind> {
        let kind = |moe: bool| {
            let mut all = (0..self.layers).filter(|layer| self.experts_of(*layer).is_some() == moe);
            let example = all.next()?;
            Some(LayerKind { example, count: 1 + all.count(), moe })
        };
        [false, true].into_iter().filter_map(kind).collect()
    }

    /// The share of one tensor parallel rank in a micro-batch of `rows` rows of `seq` tokens, in documents of
    /// `documents`.
    pub fn share(&self, layout: &ParallelLayout, rows: usize, seq: usize, documents: usize) -> Share {
        let tp = layout.tp;
        let tokens = (rows * seq).div_ceil(layout.cp);
        let seen = self.window.unwrap_or(documents).min(documents) as f64;
        let experts = self.experts.as_ref().map_or(ExpertShare::default(), |experts| {
            let (own, etp) = (tokens.div_ceil(tp) as u64, layout.expert_tp());
            let copies = own * experts.top_k as u64;
            ExpertShare {
                tokens: own,
                copies,
                rows: copies * etp as u64,
                count: (experts.count / layout.ep) as u64,
                intermediate: (experts.intermediate / etp) as u64,
                shared: (experts.shared / tp) as u64,
            }
        });
        Share {
            tokens: tokens as u64,
            stream_tokens: tokens.div_ceil(if layout.sequence_parallel() { tp } else { 1 }) as u64,
            hidden: self.hidden as u64,
            queries: (self.heads / tp * self.head_dim) as u64,
            keys: (self.kv_heads / tp.min(self.kv_heads) * self.head_dim) as u64,
            heads: (self.heads / tp) as u64,
            intermediate: (self.intermediate / tp) as u64,
            vocab: (self.vocab.next_multiple_of(self.vocab_multiple.max(1) * tp) / tp) as u64,
            visible: seen - seen * seen / (2 * documents.max(1)) as f64,
            experts,
        }
    }
}
