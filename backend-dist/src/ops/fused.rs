//! A linear layer with what stands in front of it, as one node of the graph.
//!
//! One node decides what is kept between forward and backward: always the prologue's input, and its output unless that
//! is to be computed again. An input cut along the sequence is kept cut and gathered again in the backward pass, as in
//! Megatron-LM (`LinearWithGradAccumulationAndAsyncCommunication` in `megatron/core/tensor_parallel/layers.py`).

mod node;

use burn::backend::{Backend, Dispatch, Flex, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::{
    context,
    extras::Extras,
    fp8::{self, Fp8Kept, Fp8Linear, Purpose},
    product::{Ends, Entry, Exit, Products},
    prologue::{Made, Prologue, Step},
    residual::Joint,
};

/// How a linear layer is computed.
#[derive(Clone, Debug, Default)]
pub struct LinearOptions {
    /// Where the input comes from.
    pub entry: Entry,
    /// Where the product goes.
    pub exit: Exit,
    /// Products in FP8, where all sizes are multiples of 16.
    pub fp8: Option<Fp8Linear>,
    /// The input is not kept for the backward pass but computed again there, for attention also its statistics.
    pub recompute: bool,
    /// On GPUs with an NCCL link the exchanges run beside the products, in two pieces where that is quicker.
    pub overlap: bool,
}

/// `prologue(x) · wᵀ + bias` for `w [out, in]` and `bias [out]`: the same as the prologue's operation, the exchange of
/// its entry, [`linear`](super::linear), the exchange of its exit and [`add_bias`](super::add_bias) one after the
/// other, bit for bit, and so are its gradients. Only on CUDA a product that is not exchanged adds the bias itself,
/// before it is rounded.
///
/// The weight's gradient can be [deferred](super::weight_grads::deferred).
///
/// # Panics
///
/// If shapes do not fit; see the operations.
pub fn linear_with<const D: usize>(
    x: Tensor<D>,
    prologue: Prologue,
    w: Tensor<2>,
    bias: Option<Tensor<1>>,
    options: LinearOptions,
) -> Tensor<3> {
    linear_of(x, None, prologue, w, bias, options)
}

/// [`linear_with`], with the place of the residual stream that `x` is if the prologue is a norm.
pub(super) fn linear_of<const D: usize>(
    x: Tensor<D>,
    joint: Option<Joint>,
    prologue: Prologue,
    w: Tensor<2>,
    bias: Option<Tensor<1>>,
    options: LinearOptions,
) -> Tensor<3> {
    let (shape, [out, inner]) = (x.dims(), w.dims());
    let rank = if prologue.is_attention() { 4 } else { 3 };
    assert_eq!(D, rank, "linear: the input of {prologue:?} is {shape:?}");
    let context = prologue.context(&shape);
    let (step, params) = prologue.apart("linear", &shape);
    let input = step.features(&shape);
    assert_eq!(input, inner, "linear: input has {input} features, weight [{out}, {inner}] takes {inner}");
    if let Some(bias) = &bias {
        assert_eq!(bias.dims(), [out], "linear: the bias does not fit the weight [{out}, {inner}]");
    }
    let LinearOptions { entry, exit, fp8, recompute, overlap } = options;
    let joint = joint.filter(|_| step.is_norm());
    let recompute = recompute || context.is_some();
    let how = How { step, context, ends: Ends { entry, exit, overlap }, fp8, recompute, bias: bias.is_some(), joint };
    let (x, w) = (x.into_dispatch(), w.into_dispatch());
    let extras = Extras::of(params.into_iter().chain(bias));
    Tensor::from_dispatch(<Dispatch as FusedOps>::op_linear(x, extras, w, how))
}

/// Everything about the operation that is no tensor.
#[derive(Clone, Debug)]
pub(super) struct How {
    pub step: Step,
    /// Of attention, which is then made again.
    pub context: Option<context::How>,
    pub ends: Ends,
    pub fp8: Option<Fp8Linear>,
    pub recompute: bool,
    /// Whether the last of the tensors between input and weight is the bias.
    pub bias: bool,
    /// Of a norm's input in the residual stream.
    pub joint: Option<Joint>,
}

#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Autodiff)]
pub(super) trait FusedOps: Backend {
    /// `extras` are the prologue's parameters and the bias.
    fn op_linear(
        x: FloatTensor<Self>,
        #[extension_type] extras: Extras<Self>,
        w: FloatTensor<Self>,
        how: How,
    ) -> FloatTensor<Self>;
}

/// What a forward pass gives.
struct Output<B: Products> {
    y: FloatTensor<B>,
    /// What the prologue made on the way.
    made: Made<B>,
    /// Of a product in FP8.
    fp8: Option<Fp8Kept<B>>,
}

/// `extras` are the prologue's parameters and the bias; the purpose is that of an FP8 product.
fn forward<B: Products>(
    x: FloatTensor<B>,
    extras: &[FloatTensor<B>],
    w: FloatTensor<B>,
    how: &How,
    purpose: Purpose,
) -> Output<B> {
    let made = match (how.joint.as_ref().and_then(Joint::take_normed::<B>), how.step, &how.context) {
        (Some(out), ..) => Made { out, statistics: None },
        (None, Step::Attention(heads, _), Some(context)) => {
            Made { out: context::attend::<B>(x, heads, context).0, statistics: None }
        }
        _ => how.step.forward::<B>(x, extras),
    };
    let bias = extras.last().filter(|_| how.bias).cloned();
    let fp8 = how.fp8.as_ref();
    let in_fp8 =
        fp8.and_then(|fp8| fp8::forward::<B>(fp8, made.out.clone(), w.clone(), bias.clone(), &how.ends, purpose));
    let (y, fp8) = match in_fp8 {
        Some((y, kept)) => (y, Some(kept)),
        None => (B::product(made.out.clone(), w, bias, &how.ends), None),
    };
    Output { y, made, fp8 }
}

macro_rules! fused_ops {
    ($backend:ty) => {
        impl FusedOps for $backend {
            fn op_linear(
                x: FloatTensor<Self>,
                extras: Extras<Self>,
                w: FloatTensor<Self>,
                how: How,
            ) -> FloatTensor<Self> {
                forward::<Self>(x, &Vec::from(extras), w, &how, Purpose::Evaluate).y
            }
        }
    };
}

fused_ops!(Flex);
#[cfg(feature = "cuda")]
fused_ops!(burn::backend::Cube);
