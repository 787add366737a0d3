//! What a linear layer computes on its input, without the parameters and the autograd node.

use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;

use super::{
    kernels::{LocalKernels, NormGrads, NormNeeds},
    options::{AttentionOptions, GeluKind, PackedHeads, Rms},
    plain::attention::unpack,
    saved_attention::CoreAttention,
};

/// A [`Prologue`](super::Prologue) without its parameters.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum Step {
    #[default]
    None,
    RmsNorm(Rms),
    LayerNorm(f64),
    SwiGlu,
    Gelu(GeluKind),
    GeGlu(GeluKind),
    SquaredRelu,
    Attention(PackedHeads, AttentionOptions),
    /// Its parameters are keys and values; `value` features of a value head.
    SeparateAttention {
        options: AttentionOptions,
        value: usize,
    },
}

/// The output of a prologue.
pub(super) struct PrologueOutput<B: LocalKernels> {
    /// The linear layer's input, `[.., in]`.
    pub out: FloatTensor<B>,
    /// Attention only: output `[s, b, heads, d]` and log-sum-exp.
    pub statistics: Option<[FloatTensor<B>; 2]>,
}

impl Step {
    /// Features of the linear layer's input for an input of shape `x`.
    pub fn features(self, x: &[usize]) -> usize {
        let last = x[x.len() - 1];
        match self {
            Self::None | Self::RmsNorm(_) | Self::LayerNorm(_) | Self::Gelu(_) | Self::SquaredRelu => last,
            Self::SwiGlu | Self::GeGlu(_) => last / 2,
            Self::Attention(heads, _) => heads.heads * last,
            Self::SeparateAttention { value, .. } => x[x.len() - 2] * value,
        }
    }

    /// Whether the input has a head dimension.
    pub fn is_attention(self) -> bool {
        matches!(self, Self::Attention(..) | Self::SeparateAttention { .. })
    }

    /// Queries, keys and values of attention.
    pub fn heads<B: LocalKernels>(self, x: FloatTensor<B>, params: &[FloatTensor<B>]) -> [FloatTensor<B>; 3] {
        match self {
            Self::Attention(heads, _) => unpack::<B>(x, heads),
            Self::SeparateAttention { .. } => [x, params[0].clone(), params[1].clone()],
            _ => unreachable!("{self:?} is no attention"),
        }
    }

    /// Gradients of the input and the parameters from those of queries, keys and values.
    pub fn grads_of_heads<B: LocalKernels>(self, grads: [FloatTensor<B>; 3]) -> Vec<FloatTensor<B>> {
        match self {
            Self::Attention(..) => vec![B::float_cat(grads.into(), 2)],
            _ => grads.into(),
        }
    }

    /// Whether this is RMSNorm or LayerNorm.
    pub fn is_norm(self) -> bool {
        matches!(self, Self::RmsNorm(_) | Self::LayerNorm(_))
    }

    /// Parameters of a norm.
    pub fn norm_params(self) -> usize {
        match self {
            Self::RmsNorm(_) => 1,
            Self::LayerNorm(_) => 2,
            _ => unreachable!("{self:?} is no norm"),
        }
    }

    pub fn forward<B: LocalKernels>(
        self,
        x: FloatTensor<B>,
        params: &[FloatTensor<B>],
        attention: &CoreAttention,
    ) -> PrologueOutput<B> {
        let out = match self {
            Self::None => x,
            Self::RmsNorm(norm) => B::rms_norm_forward(x, params[0].clone(), norm),
            Self::LayerNorm(eps) => B::layer_norm_forward(x, params[0].clone(), params[1].clone(), eps),
            Self::SwiGlu => B::swiglu_forward(x),
            Self::Gelu(kind) => B::gelu_forward(x, kind),
            Self::GeGlu(kind) => B::geglu_forward(x, kind),
            Self::SquaredRelu => B::squared_relu_forward(x),
            Self::Attention(heads, options) => {
                let (out, lse) = attention.run(|| B::attention_packed_forward(x, heads, options));
                return PrologueOutput { out: side_by_side::<B>(out.clone()), statistics: Some([out, lse]) };
            }
            Self::SeparateAttention { options, .. } => {
                let [k, v] = [params[0].clone(), params[1].clone()];
                let (out, lse) = attention.run(|| B::attention_forward(x, k, v, options));
                return PrologueOutput { out: side_by_side::<B>(out.clone()), statistics: Some([out, lse]) };
            }
        };
        PrologueOutput { out, statistics: None }
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
            Self::RmsNorm(norm) => B::rms_norm_grads(x, params[0].clone(), grad, norm, needs),
            Self::LayerNorm(eps) => B::layer_norm_grads(x, params[0].clone(), grad, eps, needs),
            _ => unreachable!("{self:?} is no norm"),
        }
    }
}

/// `[s, b, heads, d]` as `[s, b, heads d]`.
pub(super) fn side_by_side<B: LocalKernels>(out: FloatTensor<B>) -> FloatTensor<B> {
    let shape = out.shape();
    B::float_reshape(out, Shape::from([shape[0], shape[1], shape[2] * shape[3]]))
}
