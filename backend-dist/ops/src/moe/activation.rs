//! What experts compute between their two layers, times the probability of each token.

use burn::backend::tensor::FloatTensor as Float;

use super::kernels::MoeKernels;
use super::plain;

/// The activation of experts without biases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertActivation {
    /// `silu(gate) up`, with `[gate | up]` from the first layer.
    #[default]
    SwiGlu,
    /// `max(x, 0)²` (Nemotron 3). GPUs have no kernel of it with the probabilities: these are another operation.
    SquaredRelu,
}

impl ExpertActivation {
    /// Outputs of the first layer for each feature of the activation.
    pub fn inputs(self) -> usize {
        match self {
            Self::SwiGlu => 2,
            Self::SquaredRelu => 1,
        }
    }

    /// The activation of `x [rows, inputs n]` times `p [rows]`, at least in f32.
    pub(crate) fn weighted<B: MoeKernels>(self, x: Float<B>, p: Float<B>) -> Float<B> {
        match self {
            Self::SwiGlu => B::weighted_swiglu(x, p),
            Self::SquaredRelu => plain::weighted::<B>(x, p, B::squared_relu_forward),
        }
    }

    /// Gradients of [`weighted`](Self::weighted) in `x` and `p`.
    pub(crate) fn weighted_grads<B: MoeKernels>(self, x: Float<B>, p: Float<B>, grad: Float<B>) -> [Float<B>; 2] {
        match self {
            Self::SwiGlu => B::weighted_swiglu_grads(x, p, grad),
            Self::SquaredRelu => plain::weighted_grads::<B>(x, p, grad, B::squared_relu_forward, B::squared_relu_grad),
        }
    }
}
