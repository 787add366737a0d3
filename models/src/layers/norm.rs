//! Normalisation over the hidden dimension, replicated on every rank. Under sequence parallelism each rank normalises
//! its part of the sequence.

use backend_dist::ops::{PackedHeads, Prologue, Residual, layer_norm, norm_heads, rms_norm};
use backend_dist::shard::Init;
use burn::module::{Module, Param};
use burn::tensor::{DType, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use super::fp32_norm::normalised;
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
    #[module(skip)]
    fp32: bool,
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
        Ok(Self { weight, bias, eps, fp32: params.has_fp32_norms() })
    }

    /// An RMSNorm over the features of each of the rank's own heads: one weight for all heads.
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn of_heads(params: &mut ParamBuilder, name: &str, head_dim: usize, eps: f64) -> Result<Self, BuildError> {
        let weight = params.on_heads(&format!("{name}.weight"), [head_dim], Init::ONES)?;
        Ok(Self { weight, bias: None, eps, fp32: params.has_fp32_norms() })
    }

    /// The input and the prologue of a linear layer whose input is this norm of `x`.
    pub(super) fn in_front_of_linear(&self, x: Residual) -> (Residual, Prologue) {
        match self.prologue(x.dtype()) {
            Prologue::None => (self.rms_in_fp32(x.value()).into(), Prologue::None),
            norm => (x, norm),
        }
    }

    /// The residual stream plus `other`, which this norm reads next.
    pub(crate) fn of_sum(&self, x: Residual, other: Tensor<3>) -> Residual {
        let norm = self.prologue(x.dtype());
        x.plus(other, norm)
    }

    /// Normalises the residual stream.
    pub(super) fn of_residual(&self, x: Residual) -> Tensor<3> {
        match self.prologue(x.dtype()) {
            Prologue::None => self.rms_in_fp32(x.value()),
            norm => x.norm(norm),
        }
    }

    /// The norm as an operation's, or none if it is computed in another way.
    fn prologue(&self, dtype: DType) -> Prologue {
        let (weight, eps) = (self.weight.val(), self.eps);
        match &self.bias {
            None if self.is_rounded(dtype) => Prologue::None,
            None => Prologue::RmsNorm { weight, eps },
            Some(bias) => Prologue::LayerNorm { weight, bias: bias.val(), eps },
        }
    }

    fn is_rounded(&self, dtype: DType) -> bool {
        self.fp32 && dtype == DType::F64
    }

    /// Normalises the last dimension.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        match &self.bias {
            None if self.is_rounded(x.dtype()) => self.rms_in_fp32(x),
            None => rms_norm(x, self.weight.val(), self.eps),
            Some(bias) => layer_norm(x, self.weight.val(), bias.val(), self.eps),
        }
    }

    /// Normalises the features of each query head with `queries` and of each key head with `keys`, RMSNorms of one
    /// epsilon; `[s, b, heads + 2 kv_heads, d]` to the same.
    pub(super) fn heads([queries, keys]: &[Self; 2], qkv: Tensor<4>, packed: PackedHeads) -> Tensor<4> {
        if !queries.is_rounded(qkv.dtype()) {
            return norm_heads(qkv, [queries.weight.val(), keys.weight.val()], queries.eps, packed);
        }
        let PackedHeads { heads, kv_heads } = packed;
        let normed =
            [queries.forward(qkv.clone().narrow(2, 0, heads)), keys.forward(qkv.clone().narrow(2, heads, kv_heads))];
        Tensor::cat(normed.into_iter().chain([qkv.narrow(2, heads + kv_heads, kv_heads)]).collect(), 2)
    }

    /// The value of [`normalised`], with the gradient of the exact norm.
    fn rms_in_fp32<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let (shape, n, device) = (x.dims(), x.dims()[D - 1], x.device());
        let values = x.to_data().try_to_vec::<f64>().expect("the tensor is f64");
        let rounded = TensorData::new(normalised(&values, n, self.eps), shape);
        let weight = self.weight.val();
        let rounded = Tensor::<D>::from_data(rounded, (&device, DType::F64)) * weight.clone().detach().unsqueeze();
        let exact = rms_norm(x, weight, self.eps);
        exact.clone() + (rounded - exact.detach())
    }
}
