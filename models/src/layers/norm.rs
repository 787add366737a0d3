//! Normalisation over the hidden dimension, replicated on every rank. Under sequence parallelism each rank normalises
//! its part of the sequence.

use backend_dist::ops::{PackedHeads, Prologue, Residual, Rms, layer_norm, norm_heads, rms_norm};
use backend_dist::shard::Init;
use burn::module::{Module, Param};
use burn::tensor::{DType, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use super::fp32_norm::normalised;
use crate::param::{ParamBuilder, Result};

/// Which normalisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NormKind {
    /// `w x / √(mean(x²) + eps)`.
    Rms,
    /// `(1 + w) x / √(mean(x²) + eps)`; the weight starts at zero (Gemma, Megatron's `--apply-layernorm-1p`).
    RmsPlusOne,
    /// `w (x - mean(x)) / √(var(x) + eps) + b`.
    Layer,
}

/// A norm with its weight, and a bias if it is a layer norm; or nothing, where a block has no norm.
#[derive(Module, Debug)]
pub struct Norm {
    weight: Option<Param<Tensor<1>>>,
    bias: Option<Param<Tensor<1>>>,
    eps: f64,
    #[module(skip)]
    factor: Option<f64>,
    #[module(skip)]
    kind: NormKind,
    #[module(skip)]
    fp32: bool,
}

impl Norm {
    /// A norm of `hidden` features under the global name `name`, which starts as the plain normalisation.
    pub fn new(params: &mut ParamBuilder, name: &str, hidden: usize, kind: NormKind, eps: f64) -> Result<Self> {
        let weight = params.on_sequence(&format!("{name}.weight"), [hidden], kind.init())?;
        let bias = match kind {
            NormKind::Rms | NormKind::RmsPlusOne => None,
            NormKind::Layer => Some(params.on_sequence(&format!("{name}.bias"), [hidden], Init::ZEROS)?),
        };
        Ok(Self { weight: Some(weight), bias, eps, factor: None, kind, fp32: params.has_fp32_norms() })
    }

    /// Nothing: what reads this norm reads its input.
    pub fn none() -> Self {
        Self { weight: None, bias: None, eps: 0.0, factor: None, kind: NormKind::Rms, fp32: false }
    }

    /// An RMSNorm over the features of each of the rank's own heads: one weight for all heads.
    pub fn of_heads(params: &mut ParamBuilder, name: &str, head_dim: usize, kind: NormKind, eps: f64) -> Result<Self> {
        let weight = params.on_heads(&format!("{name}.weight"), [head_dim], kind.init())?;
        Ok(Self { weight: Some(weight), bias: None, eps, factor: None, kind, fp32: params.has_fp32_norms() })
    }

    /// An RMSNorm whose output is multiplied with `factor`, if there is one: its weight is.
    pub(crate) fn times(self, factor: Option<f64>) -> Self {
        Self { factor, ..self }
    }

    /// The input and the prologue of a linear layer whose input is this norm of `x`.
    pub(super) fn in_front_of_linear(&self, x: Residual) -> (Residual, Prologue) {
        match self.prologue(x.dtype()) {
            Prologue::None if self.weight.is_some() => (self.rms_in_fp32(x.value()).into(), Prologue::None),
            norm => (x, norm),
        }
    }

    /// The residual stream plus `other`, which this norm reads next.
    pub(crate) fn of_sum(&self, x: Residual, other: Tensor<3>) -> Residual {
        let norm = self.prologue(x.dtype());
        x.plus(other, norm)
    }

    /// Normalises the residual stream.
    pub(crate) fn of_residual(&self, x: Residual) -> Tensor<3> {
        match self.prologue(x.dtype()) {
            Prologue::None => self.forward(x.value()),
            norm => x.norm(norm),
        }
    }

    /// The norm as an operation's, or none if it is computed in another way.
    pub(super) fn prologue(&self, dtype: DType) -> Prologue {
        let Some(weight) = self.weight() else { return Prologue::None };
        match &self.bias {
            None if self.is_rounded(dtype) => Prologue::None,
            None => Prologue::RmsNorm { weight, rms: self.rms() },
            Some(bias) => Prologue::LayerNorm { weight, bias: bias.val(), eps: self.eps },
        }
    }

    /// Whether it is there.
    pub(super) fn is_some(&self) -> bool {
        self.weight.is_some()
    }

    /// What the normalised features are multiplied with, or one less, as [`rms`](Self::rms) says.
    fn weight(&self) -> Option<Tensor<1>> {
        let weight = self.weight.as_ref()?.val();
        Some(match (self.factor, self.kind) {
            (Some(factor), NormKind::RmsPlusOne) => weight.add_scalar(1.0).mul_scalar(factor),
            (Some(factor), _) => weight.mul_scalar(factor),
            (None, _) => weight,
        })
    }

    /// The RMSNorm of that weight.
    fn rms(&self) -> Rms {
        Rms { eps: self.eps, plus_one: self.kind == NormKind::RmsPlusOne && self.factor.is_none() }
    }

    fn is_rounded(&self, dtype: DType) -> bool {
        self.fp32 && dtype == DType::F64
    }

    /// Normalises the last dimension.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let Some(weight) = self.weight() else { return x };
        match &self.bias {
            None if self.is_rounded(x.dtype()) => self.rms_in_fp32(x),
            None => rms_norm(x, weight, self.rms()),
            Some(bias) => layer_norm(x, weight, bias.val(), self.eps),
        }
    }

    /// Normalises the features of each query head with `queries` and of each key head with `keys`, RMSNorms of one
    /// epsilon; `[s, b, heads + 2 kv_heads, d]` to the same.
    pub(super) fn heads([queries, keys]: &[Self; 2], qkv: Tensor<4>, packed: PackedHeads) -> Tensor<4> {
        if let (false, Some(of_queries), Some(of_keys)) =
            (queries.is_rounded(qkv.dtype()), queries.weight(), keys.weight())
        {
            return norm_heads(qkv, [of_queries, of_keys], queries.rms(), packed);
        }
        let PackedHeads { heads, kv_heads } = packed;
        let normed =
            [queries.forward(qkv.clone().narrow(2, 0, heads)), keys.forward(qkv.clone().narrow(2, heads, kv_heads))];
        Tensor::cat(normed.into_iter().chain([qkv.narrow(2, heads + kv_heads, kv_heads)]).collect(), 2)
    }

    /// The value of [`normalised`], with the gradient of the exact norm. transformers multiplies with `1 + w` in fp32,
    /// with other weights in fp64.
    fn rms_in_fp32<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let weight = self.weight().expect("a norm that is rounded is there");
        let rounded = in_fp32(&x, self.eps);
        let rounded = match self.kind {
            NormKind::RmsPlusOne => {
                let weight = weight.clone().detach().cast(DType::F32).add_scalar(1.0);
                (rounded.cast(DType::F32) * weight.unsqueeze()).cast(DType::F64)
            }
            _ => rounded * weight.clone().detach().unsqueeze(),
        };
        let exact = rms_norm(x, weight, self.rms());
        exact.clone() + (rounded - exact.detach())
    }
}

impl NormKind {
    /// The weight of the plain normalisation.
    fn init(self) -> Init {
        if self == Self::RmsPlusOne { Init::ZEROS } else { Init::ONES }
    }
}

/// [`normalised`] values of the last dimension of an f64 tensor, without gradients.
pub(super) fn in_fp32<const D: usize>(x: &Tensor<D>, eps: f64) -> Tensor<D> {
    let (shape, n, device) = (x.dims(), x.dims()[D - 1], x.device());
    let values = x.to_data().try_to_vec::<f64>().expect("the tensor is f64");
    Tensor::from_data(TensorData::new(normalised(&values, n, eps), shape), (&device, DType::F64))
}
