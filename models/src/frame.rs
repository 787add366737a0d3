//! What a decoder of a family is made of, as data.

use std::fmt;

use backend_dist::shard::Init;

use crate::causal_lm::ModelConfig;
use crate::layers::{BlockConfig, NormKind, Vocab};

/// A decoder without its blocks.
#[derive(Clone, Copy, Debug)]
pub struct Frame {
    /// Tokens and width of the residual stream.
    pub vocab: Vocab,
    /// Number of blocks.
    pub layers: usize,
    /// Number of learned positions, which are added to the embedding (GPT).
    pub positions: Option<usize>,
    /// The output layer shares the embedding's weight.
    pub tied: bool,
    /// Distribution of embeddings and output layer.
    pub init: Init,
    /// The last norm.
    pub norm: NormKind,
    /// Epsilon of the last norm.
    pub norm_eps: f64,
    /// Share of the elements dropped after the embedding.
    pub dropout: f64,
    /// Embeddings are multiplied with this (Gemma).
    pub embedding_scale: Option<f64>,
    /// Logits are multiplied with this (Granite).
    pub logit_scale: Option<f64>,
    /// A logit `z` becomes `c tanh(z/c)` (Gemma 2).
    pub logit_softcap: Option<f64>,
    /// Modules of multi-token prediction after the last block.
    pub mtp: Option<Mtp>,
}

/// Modules of multi-token prediction.
#[derive(Clone, Copy, Debug)]
pub struct Mtp {
    /// How many.
    pub modules: usize,
    /// Weight of each one's losses.
    pub weight: f64,
}

impl Frame {
    /// Number of blocks and of modules of multi-token prediction, which are counted behind the blocks.
    pub fn all_layers(&self) -> usize {
        self.layers + self.mtp.map_or(0, |mtp| mtp.modules)
    }

    /// RMSNorm and an output layer of its own, without learned positions and dropout.
    pub fn new(vocab: Vocab, layers: usize, init: Init, norm_eps: f64) -> Self {
        let (positions, embedding_scale, logit_scale, logit_softcap, mtp) = (None, None, None, None, None);
        let (tied, norm, dropout) = (false, NormKind::Rms, 0.0);
        Self {
            vocab,
            layers,
            positions,
            tied,
            init,
            norm,
            norm_eps,
            dropout,
            embedding_scale,
            logit_scale,
            logit_softcap,
            mtp,
        }
    }
}

/// The sizes of a family whose model is a [`Decoder`](crate::Decoder).
pub trait DecoderConfig: ModelConfig + fmt::Debug {
    /// What is around the blocks.
    fn frame(&self) -> Frame;

    /// What a layer is made of, or the block of a module of multi-token prediction.
    fn block(&self, layer: usize) -> BlockConfig;
}
