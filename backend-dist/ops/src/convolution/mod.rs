//! The short causal convolution in front of a linear recurrence, with its bias and SiLU, as one autograd node.

use burn::backend::{Backend, Flex, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::{
    kernels::LocalKernels,
    operation::{Tensors, apply_to_all, operation},
    plain,
};

/// `silu(bias + Σ w[kernel - 1 - d] x[position - d])` of each feature of `x [s, b, features]`, with `w [features,
/// kernel]`: every feature has a kernel of its own. In front of the sequence are zeros.
///
/// `ages [s, b]` is the number of positions of the same document in front of each position (or `kernel`, if it is more);
/// with it, values of other documents are zeros too. No gradient flows into it.
///
/// # Panics
///
/// If the sizes do not fit.
pub fn causal_convolution(x: Tensor<3>, w: Tensor<2>, bias: Option<Tensor<1>>, ages: Option<Tensor<2>>) -> Tensor<3> {
    let ([seq, samples, features], [rows, kernel]) = (x.dims(), w.dims());
    assert!(
        rows == features && kernel > 0,
        "causal_convolution: {features} features, the weight is [{rows}, {kernel}]"
    );
    if let Some(bias) = &bias {
        assert_eq!(bias.dims(), [features], "causal_convolution: the bias does not fit {features} features");
    }
    if let Some(ages) = &ages {
        assert_eq!(ages.dims(), [seq, samples], "causal_convolution: ages of other positions than [{seq}, {samples}]");
    }
    let inputs = [x.into_dispatch(), w.into_dispatch()].into_iter().chain(bias.map(Tensor::into_dispatch));
    apply_to_all(Convolution {}, inputs, Tensors::floats(ages.map(Tensor::into_dispatch)))
}

/// The tensors of [`causal_convolution`].
#[derive(Clone, Debug)]
pub struct ConvolutionInputs<B: Backend> {
    /// `[s, b, features]`.
    pub x: FloatTensor<B>,
    /// `[features, kernel]`.
    pub w: FloatTensor<B>,
    /// `[features]`.
    pub bias: Option<FloatTensor<B>>,
    /// `[s, b]`.
    pub ages: Option<FloatTensor<B>>,
}

/// Gradients of the inputs; that of the bias if there is one.
#[derive(Debug)]
pub struct ConvolutionGrads<B: Backend> {
    /// `[s, b, features]`.
    pub x: FloatTensor<B>,
    /// `[features, kernel]`.
    pub w: FloatTensor<B>,
    /// `[features]`.
    pub bias: Option<FloatTensor<B>>,
}

/// The kernels of [`causal_convolution`]; the default bodies are the formulas.
pub trait ConvolutionKernels: LocalKernels {
    /// See [`causal_convolution`].
    fn convolution(inputs: ConvolutionInputs<Self>) -> FloatTensor<Self> {
        plain::convolution::forward::<Self>(inputs)
    }

    /// The gradients, given that of the output.
    fn convolution_grads(inputs: ConvolutionInputs<Self>, grad: FloatTensor<Self>) -> ConvolutionGrads<Self> {
        plain::convolution::grads::<Self>(inputs, grad)
    }
}

impl ConvolutionKernels for Flex {}

operation! {
    /// Of the input, the weight, and the bias if there is one.
    Convolution {} for N, N, ConvolutionInputs<B>,
    |inputs, ages, tracked| {
        let mut inputs = inputs.into_iter();
        let mut next = || inputs.next();
        let (x, w) = (next().expect("an input"), next().expect("a weight"));
        let inputs = ConvolutionInputs { x, w, bias: next(), ages: ages.floats.into_iter().next() };
        let saved = tracked.then(|| inputs.clone());
        (B::convolution(inputs), saved)
    },
    |saved, grad, parents| {
        let ConvolutionGrads { x, w, bias } = B::convolution_grads(saved, grad);
        let mut grads = [Some(x), Some(w), bias].into_iter();
        parents.deliver::<B>([(); N].map(|()| grads.next().flatten()));
    },
}

#[cfg(test)]
mod tests;
