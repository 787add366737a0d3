//! The sizes of a decoder, and a rank's share of them.

use backend_dist::mesh::ParallelLayout;

use crate::flops::FlopShape;

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
    /// Transformer layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
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
}

impl Decoder {
    /// What the count of FLOPs needs to know.
    pub fn flop_shape(&self, seq: usize) -> FlopShape {
        FlopShape {
            dense_layers: self.layers,
            moe_layers: 0,
            hidden: self.hidden,
            query_width: self.heads * self.head_dim,
            kv_width: self.kv_heads * self.head_dim,
            ffn: self.intermediate,
            expert_ffn: 0,
            top_k: 0,
            shared_ffn: 0,
            gated: self.gated,
            padded_vocab: self.vocab.next_multiple_of(self.vocab_multiple.max(1)),
            seq,
        }
    }

    /// The share of one tensor parallel rank in a micro-batch of `rows` rows of `seq` tokens.
    pub fn share(&self, layout: &ParallelLayout, rows: usize, seq: usize) -> Share {
        let tp = layout.tp;
        let tokens = (rows * seq).div_ceil(layout.cp);
        let seen = self.window.unwrap_or(seq).min(seq) as f64;
        Share {
            tokens: tokens as u64,
            stream_tokens: tokens.div_ceil(if layout.sequence_parallel() { tp } else { 1 }) as u64,
            hidden: self.hidden as u64,
            queries: (self.heads / tp * self.head_dim) as u64,
            keys: (self.kv_heads / tp.min(self.kv_heads) * self.head_dim) as u64,
            heads: (self.heads / tp) as u64,
            intermediate: (self.intermediate / tp) as u64,
            vocab: (self.vocab.next_multiple_of(self.vocab_multiple.max(1) * tp) / tp) as u64,
            visible: seen - seen * seen / (2 * seq) as f64,
        }
    }
}
