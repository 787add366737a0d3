//! The short causal convolution in front of a linear recurrence, with its bias and SiLU, as one autograd node.

use burn::backend::{
    Autodiff, Backend, Dispatch, Flex,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops},
    },
    backend_extension,
    tensor::FloatTensor,
};
use burn::tensor::Tensor;

use super::{extras::Extras, kernels::LocalKernels, main_grads::deliver, plain};
use crate::extension::{finish, on_backends};

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
    let biased = bias.is_some();
    let extras = Extras::of(bias.map(Tensor::into_dispatch).into_iter().chain(ages.map(Tensor::into_dispatch)));
    let y = <Dispatch as ConvolutionOps>::op_convolution(x.into_dispatch(), w.into_dispatch(), extras, biased);
    Tensor::from_dispatch(y)
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

impl<B: Backend> ConvolutionInputs<B> {
    fn new(x: FloatTensor<B>, w: FloatTensor<B>, extras: Vec<FloatTensor<B>>, biased: bool) -> Self {
        let mut extras = extras.into_iter();
        let bias = if biased { extras.next() } else { None };
        Self { x, w, bias, ages: extras.next() }
    }
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

#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Autodiff)]
trait ConvolutionOps: Backend {
    /// `extras` are the bias, if it is `biased`, and the ages.
    fn op_convolution(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        #[extension_type] extras: Extras<Self>,
        biased: bool,
    ) -> FloatTensor<Self>;
}

on_backends! {
    impl ConvolutionOps {
        fn op_convolution(
            x: FloatTensor<Self>,
            w: FloatTensor<Self>,
            extras: Extras<Self>,
            biased: bool,
        ) -> FloatTensor<Self> {
            Self::convolution(ConvolutionInputs::new(x, w, extras.into(), biased))
        }
    }
}

/// Parents: the input, the weight, and the bias if there is one.
#[derive(Debug)]
struct Convolution;

impl<B: ConvolutionKernels, const N: usize> Backward<B, N> for Convolution {
    type State = ConvolutionInputs<B>;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let ConvolutionGrads { x, w, bias } = B::convolution_grads(ops.state, grad);
        for (node, grad) in ops.parents.into_iter().zip([Some(x), Some(w), bias]) {
            if let (Some(node), Some(grad)) = (node, grad) {
                deliver::<B>(grads, node.id, grad);
            }
        }
    }
}

/// `parents` are those of [`Convolution`].
fn record<B: ConvolutionKernels, C: CheckpointStrategy, const N: usize>(
    parents: [FloatTensor<Autodiff<B, C>>; N],
    ages: Option<FloatTensor<Autodiff<B, C>>>,
) -> FloatTensor<Autodiff<B, C>> {
    let mut tensors = Vec::with_capacity(N);
    let nodes = parents.map(|parent| {
        let (tensor, node) = parent.into_parts();
        tensors.push(tensor);
        node
    });
    let rest = tensors.split_off(2).into_iter().chain(ages.map(|ages| ages.into_primitive())).collect();
    let w = tensors.pop().expect("there is a weight");
    let inputs = ConvolutionInputs::<B>::new(tensors.remove(0), w, rest, N == 3);
    let y = B::convolution(inputs.clone());
    finish!(Convolution, nodes, inputs, y)
}

impl<B: ConvolutionKernels, C: CheckpointStrategy> ConvolutionOps for Autodiff<B, C> {
    fn op_convolution(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        extras: Extras<Self>,
        biased: bool,
    ) -> FloatTensor<Self> {
        let mut extras = Vec::from(extras).into_iter();
        match extras.next() {
            Some(bias) if biased => record::<B, C, 3>([x, w, bias], extras.next()),
            ages => record::<B, C, 2>([x, w], ages),
        }
    }
}

#[cfg(test)]
mod tests;
