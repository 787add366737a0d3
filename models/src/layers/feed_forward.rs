//! The feed-forward part of a block, dense or MoE.

use backend_dist::ops::Residual;
use burn::module::Module;
use burn::tensor::Tensor;

use super::mlp::Mlp;
use super::moe::{Ffn, MoeLayer};
use super::norm::Norm;
use super::row_linear::Summand;
use crate::micro_batch::MicroBatch;
use crate::param::{ParamBuilder, Result};

/// The layer of an [`Ffn`].
#[derive(Module, Debug)]
#[expect(clippy::large_enum_variant, reason = "one for each block, never moved about")]
pub enum FeedForward {
    /// One MLP for all tokens.
    Dense(Mlp),
    /// Experts, of which each token uses some.
    Moe(MoeLayer),
}

impl FeedForward {
    /// A feed-forward part under the global name `name`.
    pub fn new(params: &mut ParamBuilder, name: &str, config: &Ffn) -> Result<Self> {
        Ok(match config {
            Ffn::Dense(config) => Self::Dense(Mlp::new(params, name, config)?),
            Ffn::Moe(config) => Self::Moe(MoeLayer::new(params, name, config)?),
        })
    }

    /// `[s, b, hidden]` to the same, or the rank's parts of the sequence to the same, after the block's norm.
    pub fn forward(&self, x: impl Into<Residual>, norm: &Norm, batch: &MicroBatch) -> Tensor<3> {
        match self {
            Self::Dense(mlp) => mlp.forward(x, norm, batch),
            Self::Moe(layer) => layer.forward(x, norm, batch),
        }
    }

    /// The same for a decode step on a GPU.
    pub(super) fn decode(&self, x: Residual, norm: &Norm) -> Summand {
        match self {
            Self::Dense(mlp) => mlp.decode(x, norm),
            Self::Moe(layer) => Summand::Whole(layer.decode(x, norm)),
        }
    }

    /// The weight that a decode step reads first, if that is known.
    pub(super) fn first_weight(&self) -> Option<Tensor<2>> {
        match self {
            Self::Dense(mlp) => mlp.first_weight(),
            Self::Moe(_) => None,
        }
    }

    /// Whether nothing in a decode step of so many tokens waits for the host.
    pub(crate) fn decodes(&self, tokens: usize) -> bool {
        match self {
            Self::Dense(_) => true,
            Self::Moe(layer) => layer.decodes(tokens),
        }
    }
}
