//! What may stand in front of a linear layer and be computed as one operation with it.

use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{Shape, Tensor};

use super::{
    attended::attended,
    context::{ContextParallel, Documents, How, how},
    kernels::{LocalKernels, NormGrads, NormNeeds},
    options::{AttentionOptions, GeluKind, PackedHeads},
    residual::ResidualKernels,
};

/// What is done to the input of [`linear_with`](super::linear_with) before the matrix product.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "made for one call and taken apart by it")]
pub enum Prologue {
    /// Nothing.
    None,
    /// [`rms_norm`](super::rms_norm).
    RmsNorm {
        /// `[hidden]`.
        weight: Tensor<1>,
        /// Added to the mean of squares.
        eps: f64,
    },
    /// [`layer_norm`](super::layer_norm).
    LayerNorm {
        /// `[hidden]`.
        weight: Tensor<1>,
        /// `[hidden]`.
        bias: Tensor<1>,
        /// Added to the variance.
        eps: f64,
    },
    /// [`swiglu`](super::swiglu).
    SwiGlu,
    /// [`gelu`](super::gelu).
    Gelu(GeluKind),
    /// [`attention_packed`](super::attention_packed) of `[s, b, heads + 2 kv_heads, d]`, its heads side by side.
    Attention(PackedHeads, AttentionOptions),
    /// [`attention_in_context`](super::context::attention_in_context) of `[s, b, heads + 2 kv_heads, d]`, its heads
    /// side by side. Where ranks share sequences or documents are told apart it is always made again in the backward
    /// pass, on all ranks of the context with its exchanges; else it is [`Prologue::Attention`].
    AttentionInContext(PackedHeads, AttentionOptions, Option<ContextParallel>, Option<Documents>),
}

impl Prologue {
    /// Whether its input has heads.
    pub(super) fn is_attention(&self) -> bool {
        matches!(self, Self::Attention(..) | Self::AttentionInContext(..))
    }

    /// What there is to know of the context of attention over `x`, if there is one.
    ///
    /// # Panics
    ///
    /// As [`attention_in_context`](super::context::attention_in_context).
    pub(super) fn context(&self, x: &[usize]) -> Option<How> {
        let Self::AttentionInContext(PackedHeads { heads, kv_heads }, options, context, documents) = self else {
            return None;
        };
        let context = context.as_ref().filter(|context| context.group.size() > 1);
        let alone = context.is_none() && documents.is_none();
        (!alone).then(|| how([x[0], x[1]], [*heads, *kv_heads], *options, context, documents.as_ref()))
    }

    /// The step and its parameters, for an input of shape `x`.
    ///
    /// # Panics
    ///
    /// If heads or parameters do not fit; `operation` is what the message begins with.
    pub(super) fn apart(self, operation: &str, x: &[usize]) -> (Step, Vec<Tensor<1>>) {
        let hidden = x[x.len() - 1];
        let (step, params) = match self {
            Self::None => (Step::None, vec![]),
            Self::RmsNorm { weight, eps } => (Step::RmsNorm(eps), vec![weight]),
            Self::LayerNorm { weight, bias, eps } => (Step::LayerNorm(eps), vec![weight, bias]),
            Self::SwiGlu => (Step::SwiGlu, vec![]),
            Self::Gelu(kind) => (Step::Gelu(kind), vec![]),
            Self::Attention(heads, options) | Self::AttentionInContext(heads, options, ..) => {
                let found = x[x.len() - 2];
                assert_eq!(found, heads.total(), "attention: {heads:?} do not make up the input's heads");
                (Step::Attention(heads, options), vec![])
            }
        };
        for param in &params {
            assert_eq!(param.dims(), [hidden], "{operation}: a norm's parameter does not fit {hidden} features");
        }
        (step, params)
    }
}

/// A [`Prologue`] without its parameters.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    None,
    RmsNorm(f64),
    LayerNorm(f64),
    SwiGlu,
    Gelu(GeluKind),
    Attention(PackedHeads, AttentionOptions),
}

/// What a step gives.
pub(super) struct Made<B: LocalKernels> {
    /// The linear layer's input, `[.., in]`.
    pub out: FloatTensor<B>,
    /// Of attention: output `[s, b, heads, d]` and log-sum-exp.
    pub statistics: Option<[FloatTensor<B>; 2]>,
}

impl Step {
    /// Features of the linear layer's input for an input of shape `x`.
    pub fn features(self, x: &[usize]) -> usize {
        let last = x[x.len() - 1];
        match self {
            Self::None | Self::RmsNorm(_) | Self::LayerNorm(_) | Self::Gelu(_) => last,
            Self::SwiGlu => last / 2,
            Self::Attention(heads, _) => heads.heads * last,
        }
    }

    /// Whether this is RMSNorm or LayerNorm.
    pub fn is_norm(self) -> bool {
        matches!(self, Self::RmsNorm(_) | Self::LayerNorm(_))
    }

    pub fn forward<B: LocalKernels>(self, x: FloatTensor<B>, params: &[FloatTensor<B>]) -> Made<B> {
        let out = match self {
            Self::None => x,
            Self::RmsNorm(eps) => B::rms_norm_forward(x, params[0].clone(), eps),
            Self::LayerNorm(eps) => B::layer_norm_forward(x, params[0].clone(), params[1].clone(), eps),
            Self::SwiGlu => B::swiglu_forward(x),
            Self::Gelu(kind) => B::gelu_forward(x, kind),
            Self::Attention(heads, options) => {
                let (out, lse) = attended(|| B::attention_packed_forward(x, heads, options));
                return Made { out: side_by_side::<B>(out.clone()), statistics: Some([out, lse]) };
            }
        };
        Made { out, statistics: None }
    }

    /// Gradients of a norm.
    pub fn norm_grads<B: LocalKernels>(
        self,
        x: FloatTensor<B>,
        params: &[FloatTensor<B>],
        grad: FloatTensor<B>,
        needs: NormNeeds,
    ) -> NormGrads<B> {
        match self {
            Self::RmsNorm(eps) => B::rms_norm_grads(x, params[0].clone(), grad, eps, needs),
            Self::LayerNorm(eps) => B::layer_norm_grads(x, params[0].clone(), grad, eps, needs),
            _ => unreachable!("{self:?} is no norm"),
        }
    }

    /// Gradients of the input and of the parameters, those that are needed; `grad` has the shape of the output. `other`
    /// is added to that of a norm's input.
    pub fn grads<B: ResidualKernels, const N: usize>(
        self,
        x: FloatTensor<B>,
        params: &[FloatTensor<B>],
        statistics: Option<[FloatTensor<B>; 2]>,
        grad: FloatTensor<B>,
        other: Option<FloatTensor<B>>,
        needed: [bool; N],
    ) -> [Option<FloatTensor<B>>; N] {
        let needs = |i: usize| needed.get(i).copied().unwrap_or(false);
        let all = NormNeeds { x: needs(0), w: needs(1), b: needs(2) };
        let NormGrads { x, w, b } = match self {
            Self::RmsNorm(_) | Self::LayerNorm(_) => match other {
                Some(other) => B::norm_grads_plus(x, self, params, grad, other, all),
                None => self.norm_grads::<B>(x, params, grad, all),
            },
            Self::None => only(grad),
            Self::SwiGlu => only(B::swiglu_grad(x, grad)),
            Self::Gelu(kind) => only(B::gelu_grad(x, grad, kind)),
            Self::Attention(heads, options) => {
                let statistics = statistics.expect("attention leaves statistics");
                let grad = B::float_reshape(grad, statistics[0].shape());
                only(B::attention_packed_grad(x, statistics, grad, heads, options))
            }
        };
        let mut found = [x, w, b].into_iter();
        needed.map(|needed| found.next().flatten().filter(|_| needed))
    }
}

fn only<B: LocalKernels>(x: FloatTensor<B>) -> NormGrads<B> {
    NormGrads { x: Some(x), w: None, b: None }
}

/// `[s, b, heads, d]` as `[s, b, heads d]`.
pub(super) fn side_by_side<B: LocalKernels>(out: FloatTensor<B>) -> FloatTensor<B> {
    let shape = out.shape();
    B::float_reshape(out, Shape::from([shape[0], shape[1], shape[2] * shape[3]]))
}
