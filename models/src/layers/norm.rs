//! Normalisation over the hidden dimension, replicated on every rank. Under sequence parallelism each rank normalises
//! its part of the sequence.

use backend_dist::ops::{layer_norm, rms_norm};
use backend_dist::shard::Init;
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::param::{BuildError, ParamBuilder};

/// Which normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NormKind {
    /// `w x / √(mean(x²) + eps)`.
    Rms,
    /// `w (x - mean(x)) / √(var(x) + eps) + b`.
    Layer,
}

/// A norm with its weight, and a bias if it is a layer norm.
#[derive(Module, Debug)]
pub struct Norm {
    weight: Param<Tensor<1>>,
    bias: Option<Param<Tensor<1>>>,
    eps: f64,
}

impl Norm {
    /// A norm of `hidden` features under the global name `name`; the weight starts at one, the bias at zero.
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn new(
        params: &mut ParamBuilder,
        name: &str,
        hidden: usize,
        kind: NormKind,
        eps: f64,
    ) -> Result<Self, BuildError> {
        let weight = params.on_sequence(&format!("{name}.weight"), [hidden], Init::ONES)?;
        let bias = match kind {
            NormKind::Rms => None,
            NormKind::Layer => Some(params.on_sequence(&format!("{name}.bias"), [hidden], Init::ZEROS)?),
        };
        Ok(Self { weight, bias, eps })
    }

    /// Normalises the last dimension.
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        match &self.bias {
            None => rms_norm(x, self.weight.val(), self.eps),
            Some(bias) => layer_norm(x, self.weight.val(), bias.val(), self.eps),
        }
    }
}
