//! What mixes the positions of a sequence in a block: attention, latent attention, or a linear recurrence.

use backend_dist::ops::Residual;
use burn::module::Module;
use burn::tensor::Tensor;

use super::attention::{AttentionConfig, SelfAttention};
use super::frequencies::RopeConfig;
use super::gated_delta::{GatedDeltaConfig, GatedDeltaNet};
use super::mamba::{Mamba2Mixer, Mamba2MixerConfig};
use super::mla::{LatentAttention, MlaConfig};
use super::norm::Norm;
use super::paged::{Decode, PagedKvCache, Step};
use super::recurrent::Recurrence;
use super::rope::Angles;
use super::row_linear::Summand;
use crate::micro_batch::MicroBatch;
use crate::param::{ParamBuilder, Result};

/// Which token mixer a block has.
#[allow(
    clippy::large_enum_variant,
    reason = "configurations are copied, and LongRoPE has its factors in the value itself"
)]
#[derive(Clone, Copy, Debug)]
pub enum Mixer {
    /// Softmax attention.
    Attention(AttentionConfig),
    /// Multi-head latent attention.
    Latent(MlaConfig),
    /// Gated DeltaNet.
    GatedDelta(GatedDeltaConfig),
    /// Mamba-2.
    Mamba2(Mamba2MixerConfig),
}

impl Mixer {
    /// Attention, if it is.
    pub fn attention(&self) -> Option<&AttentionConfig> {
        match self {
            Self::Attention(attention) => Some(attention),
            Self::Latent(_) | Self::GatedDelta(_) | Self::Mamba2(_) => None,
        }
    }

    /// The rotation of queries and keys, if they are rotated.
    pub fn rope(&self) -> Option<RopeConfig> {
        match self {
            Self::Attention(attention) => attention.rope,
            Self::Latent(latent) => Some(latent.rope),
            Self::GatedDelta(_) | Self::Mamba2(_) => None,
        }
    }

    /// Features in and out.
    pub fn hidden(&self) -> usize {
        match self {
            Self::Attention(attention) => attention.hidden,
            Self::Latent(latent) => latent.hidden,
            Self::GatedDelta(delta) => delta.hidden,
            Self::Mamba2(mamba) => mamba.hidden,
        }
    }

    /// The mixer's global name in a block.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Attention(_) | Self::Latent(_) => "attention",
            Self::GatedDelta(_) => "linear_attention",
            Self::Mamba2(_) => "mamba",
        }
    }
}

/// The layer of a [`Mixer`].
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant, reason = "one for each layer")]
pub(super) enum TokenMixer {
    Attention(SelfAttention),
    Latent(LatentAttention),
    GatedDelta(GatedDeltaNet),
    Mamba2(Mamba2Mixer),
}

const ROTATED: &str = "latent attention rotates queries and keys";

impl TokenMixer {
    pub fn new(params: &mut ParamBuilder, name: &str, config: &Mixer) -> Result<Self> {
        Ok(match config {
            Mixer::Attention(config) => Self::Attention(SelfAttention::new(params, name, config)?),
            Mixer::Latent(config) => Self::Latent(LatentAttention::new(params, name, config)?),
            Mixer::GatedDelta(config) => Self::GatedDelta(GatedDeltaNet::new(params, name, config)?),
            Mixer::Mamba2(config) => Self::Mamba2(Mamba2Mixer::new(params, name, config)?),
        })
    }

    pub fn forward(&self, x: Residual, norm: &Norm, angles: Option<&Angles>, batch: &MicroBatch) -> Tensor<3> {
        match self {
            Self::Attention(attention) => attention.forward(x, norm, angles, batch),
            Self::Latent(latent) => latent.forward(x, norm, angles.expect(ROTATED), batch),
            Self::GatedDelta(delta) => delta.forward(x, norm, batch),
            Self::Mamba2(mamba) => mamba.forward(x, norm, batch),
        }
    }

    pub fn extend(
        &self,
        x: Residual,
        norm: &Norm,
        step: &Step,
        angles: Option<&Angles>,
        cache: (usize, &mut PagedKvCache),
    ) -> Tensor<3> {
        match self {
            Self::Attention(attention) => attention.extend(x, norm, step, angles, cache),
            Self::Latent(latent) => latent.extend(x, norm, step, angles.expect(ROTATED), cache),
            Self::GatedDelta(delta) => delta.extend(x, norm, step, cache),
            Self::Mamba2(mamba) => mamba.extend(x, norm, step, cache),
        }
    }

    /// # Panics
    /// For latent attention and linear recurrences, of which [`decodes`](Self::decodes) says that they have no kernel.
    pub fn decode(&self, x: Residual, norm: &Norm, step: (usize, &Decode), angles: Option<&Angles>) -> Summand {
        match self {
            Self::Attention(attention) => attention.decode(x, norm, step, angles),
            _ => panic!("latent attention and linear recurrences have no kernel for recorded steps"),
        }
    }

    /// The weight that a decode step reads first.
    pub fn first_weight(&self) -> Option<Tensor<2>> {
        match self {
            Self::Attention(attention) => attention.first_weight(),
            _ => None,
        }
    }

    pub fn decodes(&self, layer: usize, cache: &PagedKvCache) -> bool {
        matches!(self, Self::Attention(attention) if attention.decodes(layer, cache))
    }
}
