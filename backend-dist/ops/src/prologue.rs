//! What a linear layer computes on its input, in the same operation as the GEMM.

use burn::backend::{Dispatch, TensorMetadata, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::{
    context::{ContextOptions, ContextParallel, Documents, context_options},
    kernels::{LocalKernels, NormGrads, NormNeeds},
    options::{AttentionOptions, GeluKind, PackedHeads, Rms},
    residual::ResidualKernels,
    step::Step,
};

/// Applied to the input of [`linear_with`](super::linear_with) before the GEMM.
#[derive(Clone, Debug)]
pub enum Prologue {
    /// Nothing.
    None,
    /// [`rms_norm`](super::rms_norm).
    RmsNorm {
        /// `[hidden]`.
        weight: Tensor<1>,
        /// Its epsilon, and what the weight stands for.
        rms: Rms,
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
    /// [`geglu`](super::geglu).
    GeGlu(GeluKind),
    /// [`squared_relu`](super::squared_relu).
    SquaredRelu,
    /// [`attention_packed`](super::attention_packed) of `[s, b, heads + 2 kv_heads, d]`, its heads side by side.
    Attention(PackedHeads, AttentionOptions),
    /// [`attention_in_context`](super::context::attention_in_context) of `[s, b, heads + 2 kv_heads, d]`, its heads
    /// side by side. With context parallelism or document masks, attention is always recomputed in the backward pass,
    /// on all ranks of the context with its collectives. Otherwise this is [`Prologue::Attention`].
    AttentionInContext(PackedHeads, AttentionOptions, Option<ContextParallel>, Option<Documents>),
    /// [`attention_over_context`](super::context::attention_over_context) of queries `[s, b, heads, d]`, its heads
    /// concatenated; recomputed like [`Prologue::AttentionInContext`].
    SeparateAttention {
        /// `[s, b, kv_heads, d]`.
        k: Tensor<4>,
        /// `[s, b, kv_heads, dv]`.
        v: Tensor<4>,
        /// Mask, scale, dropout.
        options: AttentionOptions,
        /// The ranks that share sequences.
        context: Option<ContextParallel>,
        /// Packed documents.
        documents: Option<Documents>,
    },
}

impl Prologue {
    /// Whether the input has a head dimension.
    pub(super) fn is_attention(&self) -> bool {
        matches!(self, Self::Attention(..) | Self::AttentionInContext(..) | Self::SeparateAttention { .. })
    }

    /// The context plan of attention over `x`; none if one rank has whole sequences without documents.
    ///
    /// # Panics
    ///
    /// As [`attention_in_context`](super::context::attention_in_context).
    pub(super) fn context(&self, x: &[usize]) -> Option<ContextOptions> {
        let (heads, kv_heads, options, context, documents) = match self {
            Self::AttentionInContext(PackedHeads { heads, kv_heads }, options, context, documents) => {
                (*heads, *kv_heads, options, context, documents)
            }
            Self::SeparateAttention { k, options, context, documents, .. } => {
                (x[2], k.dims()[2], options, context, documents)
            }
            _ => return None,
        };
        let context = context.as_ref().filter(|context| context.group.size() > 1);
        let alone = context.is_none() && documents.is_none();
        (!alone).then(|| context_options([x[0], x[1]], [heads, kv_heads], *options, context, documents.as_ref()))
    }

    /// The prologue without its parameters, and the parameters, for an input of shape `x`.
    ///
    /// # Panics
    ///
    /// If heads or parameters do not fit; the message begins with `operation`.
    pub(super) fn split(self, operation: &str, x: &[usize]) -> (Step, Vec<FloatTensor<Dispatch>>) {
        let hidden = x[x.len() - 1];
        let (step, params) = match self {
            Self::None => (Step::None, vec![]),
            Self::RmsNorm { weight, rms } => (Step::RmsNorm(rms), vec![weight]),
            Self::LayerNorm { weight, bias, eps } => (Step::LayerNorm(eps), vec![weight, bias]),
            Self::SwiGlu => (Step::SwiGlu, vec![]),
            Self::Gelu(kind) => (Step::Gelu(kind), vec![]),
            Self::GeGlu(kind) => (Step::GeGlu(kind), vec![]),
            Self::SquaredRelu => (Step::SquaredRelu, vec![]),
            Self::Attention(heads, options) | Self::AttentionInContext(heads, options, ..) => {
                let found = x[x.len() - 2];
                assert_eq!(found, heads.total(), "attention: {heads:?} do not make up the input's heads");
                (Step::Attention(heads, options), vec![])
            }
            Self::SeparateAttention { k, v, options, .. } => {
                let (keys, values) = (k.dims(), v.dims());
                assert_eq!(
                    keys[..3],
                    values[..3],
                    "attention: k is {keys:?}, v is {values:?}; only the last may differ"
                );
                assert_eq!(x, [keys[0], keys[1], x[2], keys[3]], "attention: q is {x:?}, k is {keys:?}");
                let step = Step::SeparateAttention { options, value: values[3] };
                return (step, vec![k.into_dispatch(), v.into_dispatch()]);
            }
        };
        for param in &params {
            assert_eq!(param.dims(), [hidden], "{operation}: a norm's parameter does not fit {hidden} features");
        }
        (step, params.into_iter().map(Tensor::into_dispatch).collect())
    }
}

/// The gradients of the input and of the parameters that are needed; `grad` has the shape of the output. `other` is
/// added to the gradient of a norm's input.
pub(super) fn step_grads<B: ResidualKernels, const N: usize>(
    step: Step,
    x: FloatTensor<B>,
    params: &[FloatTensor<B>],
    statistics: Option<[FloatTensor<B>; 2]>,
    grad: FloatTensor<B>,
    other: Option<FloatTensor<B>>,
    needed: [bool; N],
) -> [Option<FloatTensor<B>>; N] {
    let needs = |i: usize| needed.get(i).copied().unwrap_or(false);
    let all = NormNeeds { x: needs(0), w: needs(1), b: needs(2) };
    let NormGrads { x, w, b } = match step {
        Step::RmsNorm(_) | Step::LayerNorm(_) => match other {
            Some(other) => B::norm_grads_plus(x, step, params, grad, other, all),
            None => step.norm_grads::<B>(x, params, grad, all),
        },
        Step::None => only(grad),
        Step::SwiGlu => only(B::swiglu_grad(x, grad)),
        Step::Gelu(kind) => only(B::gelu_grad(x, grad, kind)),
        Step::GeGlu(kind) => only(B::geglu_grad(x, grad, kind)),
        Step::SquaredRelu => only(B::squared_relu_grad(x, grad)),
        Step::Attention(heads, options) => {
            let statistics = statistics.expect("attention leaves statistics");
            let grad = B::float_reshape(grad, statistics[0].shape());
            only(B::attention_packed_grad(x, statistics, grad, heads, options))
        }
        Step::SeparateAttention { options, .. } => {
            let statistics = statistics.expect("attention leaves statistics");
            let grad = B::float_reshape(grad, statistics[0].shape());
            let heads = step.heads::<B>(x, params);
            let [q, k, v] = B::attention_grads(heads, statistics, grad, options);
            NormGrads { x: Some(q), w: Some(k), b: Some(v) }
        }
    };
    let mut found = [x, w, b].into_iter();
    needed.map(|needed| found.next().flatten().filter(|_| needed))
}

fn only<B: LocalKernels>(x: FloatTensor<B>) -> NormGrads<B> {
    NormGrads { x: Some(x), w: None, b: None }
}
