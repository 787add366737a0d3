//! A linear layer with what stands in front of it, as one node of the graph.
//!
//! One node decides what is kept between forward and backward: always the prologue's input, and its output unless that
//! is to be computed again. An input cut along the sequence is kept cut and gathered again in the backward pass, as in
//! Megatron-LM (`LinearWithGradAccumulationAndAsyncCommunication` in `megatron/core/tensor_parallel/layers.py`).

use burn::backend::{
    Autodiff, Backend, Dispatch, Flex,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::FloatTensor,
};
use burn::tensor::Tensor;

use super::{
    fp8::{self, Fp8Kept, Fp8Linear, Fp8Weight, Purpose},
    kernels::LocalKernels,
    main_grads::deliver,
    product::{Ends, Entry, Exit, Products, Weight},
    prologue::{Made, Prologue, Step, side_by_side},
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
/// its entry, [`linear`](super::linear), the exchange of its exit and [`add_bias`](super::add_bias) one after the other, bit
/// for bit, and so are its gradients. Only on CUDA a product that is not exchanged adds the bias itself, before it is
/// rounded.
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
    let (shape, [out, inner]) = (x.dims(), w.dims());
    let rank = if matches!(prologue, Prologue::Attention(..)) { 4 } else { 3 };
    assert_eq!(D, rank, "linear: the input of {prologue:?} is {shape:?}");
    let hidden = shape[D - 1];
    let (step, params) = match prologue {
        Prologue::None => (Step::None, vec![]),
        Prologue::RmsNorm { weight, eps } => (Step::RmsNorm(eps), vec![weight]),
        Prologue::LayerNorm { weight, bias, eps } => (Step::LayerNorm(eps), vec![weight, bias]),
        Prologue::SwiGlu => (Step::SwiGlu, vec![]),
        Prologue::Gelu(kind) => (Step::Gelu(kind), vec![]),
        Prologue::Attention(heads, options) => {
            assert_eq!(shape[D - 2], heads.total(), "attention: {heads:?} do not make up the input's heads");
            (Step::Attention(heads, options), vec![])
        }
    };
    for param in &params {
        assert_eq!(param.dims(), [hidden], "linear: a norm's parameter does not fit {hidden} features");
    }
    let input = step.features(&shape);
    assert_eq!(input, inner, "linear: input has {input} features, weight [{out}, {inner}] takes {inner}");
    if let Some(bias) = &bias {
        assert_eq!(bias.dims(), [out], "linear: the bias does not fit the weight [{out}, {inner}]");
    }
    let LinearOptions { entry, exit, fp8, recompute, overlap } = options;
    let how = How { step, ends: Ends { entry, exit, overlap }, fp8, recompute, bias: bias.is_some() };
    let (x, w) = (x.into_dispatch(), w.into_dispatch());
    let mut extras = params.into_iter().chain(bias).map(Tensor::into_dispatch);
    Tensor::from_dispatch(match (extras.next(), extras.next(), extras.next()) {
        (None, ..) => Dispatch::op_linear(x, w, how),
        (Some(a), None, _) => Dispatch::op_linear_one(x, a, w, how),
        (Some(a), Some(b), None) => Dispatch::op_linear_two(x, a, b, w, how),
        (Some(a), Some(b), Some(c)) => Dispatch::op_linear_three(x, a, b, c, w, how),
    })
}

/// Everything about the operation that is no tensor.
#[derive(Clone, Debug)]
pub(super) struct How {
    pub step: Step,
    pub ends: Ends,
    pub fp8: Option<Fp8Linear>,
    pub recompute: bool,
    /// Whether the last of the tensors between input and weight is the bias.
    pub bias: bool,
}

#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Autodiff)]
pub(super) trait FusedOps: Backend {
    fn op_linear(x: FloatTensor<Self>, w: FloatTensor<Self>, how: How) -> FloatTensor<Self>;

    /// With one parameter of the prologue, or a bias.
    fn op_linear_one(x: FloatTensor<Self>, a: FloatTensor<Self>, w: FloatTensor<Self>, how: How) -> FloatTensor<Self>;

    /// With two parameters of the prologue, or one and a bias.
    fn op_linear_two(
        x: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        w: FloatTensor<Self>,
        how: How,
    ) -> FloatTensor<Self>;

    /// With two parameters of the prologue and a bias.
    fn op_linear_three(
        x: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        c: FloatTensor<Self>,
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
    let made = how.step.forward::<B>(x, extras);
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
            fn op_linear(x: FloatTensor<Self>, w: FloatTensor<Self>, how: How) -> FloatTensor<Self> {
                forward::<Self>(x, &[], w, &how, Purpose::Evaluate).y
            }

            fn op_linear_one(
                x: FloatTensor<Self>,
                a: FloatTensor<Self>,
                w: FloatTensor<Self>,
                how: How,
            ) -> FloatTensor<Self> {
                forward::<Self>(x, &[a], w, &how, Purpose::Evaluate).y
            }

            fn op_linear_two(
                x: FloatTensor<Self>,
                a: FloatTensor<Self>,
                b: FloatTensor<Self>,
                w: FloatTensor<Self>,
                how: How,
            ) -> FloatTensor<Self> {
                forward::<Self>(x, &[a, b], w, &how, Purpose::Evaluate).y
            }

            fn op_linear_three(
                x: FloatTensor<Self>,
                a: FloatTensor<Self>,
                b: FloatTensor<Self>,
                c: FloatTensor<Self>,
                w: FloatTensor<Self>,
                how: How,
            ) -> FloatTensor<Self> {
                forward::<Self>(x, &[a, b, c], w, &how, Purpose::Evaluate).y
            }
        }
    };
}

fused_ops!(Flex);
#[cfg(feature = "cuda")]
fused_ops!(burn::backend::Cube);

/// What a linear layer keeps for its backward pass.
#[derive(Clone, Debug)]
struct Kept<B: LocalKernels> {
    how: How,
    /// The prologue's input, unless nothing in front of the product needs it.
    x: Option<FloatTensor<B>>,
    params: Vec<FloatTensor<B>>,
    /// The product's input if the weight wants a gradient; `None` also if it is made again from `x`.
    out: Option<FloatTensor<B>>,
    /// Of attention, unless made again.
    statistics: Option<[FloatTensor<B>; 2]>,
    /// If something in front of the product wants a gradient.
    w: Option<FloatTensor<B>>,
    /// Of a product in FP8, which keeps its own form of `out`.
    fp8: Option<Fp8Kept<B>>,
}

/// Parents: the input, the prologue's parameters, the bias if there is one, the weight.
#[derive(Debug)]
struct Linear;

impl<B: Products, const N: usize> Backward<B, N> for Linear {
    type State = Kept<B>;

    fn backward(self, ops: Ops<Kept<B>, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let Kept { how, x, params, out, mut statistics, w, fp8 } = ops.state;
        let How { step, ends, fp8: layer, recompute, bias } = how;
        let (weight, others) = (&ops.parents[N - 1], &ops.parents[..N - 1]);
        let (inputs, biases) = others.split_at(others.len() - usize::from(bias));
        if let [Some(node)] = biases {
            deliver::<B>(grads, node.id, B::bias_grad(grad.clone()));
        }
        let mut out = out.or_else(|| statistics.as_ref().map(|[out, _]| side_by_side::<B>(out.clone())));
        let used = weight.is_some() || matches!(step, Step::Attention(..));
        if let (true, Some(x)) = (recompute && used, &x) {
            let made = step.forward::<B>(x.clone(), &params);
            (out, statistics) = (Some(made.out), made.statistics);
        }
        let weight = weight.as_ref().map(|node| (node.id, node.order == 0));
        let grad = match layer.zip(fp8) {
            Some((layer, kept)) => {
                let weight = weight.map(|(id, is_leaf)| Fp8Weight { id, is_leaf, input: out });
                fp8::backward::<B>(&layer, kept, grad, w, weight, &ends, grads)
            }
            None => {
                let weight = weight.zip(out).map(|((id, is_leaf), input)| Weight { id, is_leaf, input });
                B::product_grads(grad, w, weight, &ends, grads)
            }
        };
        if let Some(grad) = grad {
            let needed: [bool; N] = std::array::from_fn(|i| inputs.get(i).is_some_and(Option::is_some));
            let x = x.unwrap_or_else(|| grad.clone());
            for (node, grad) in inputs.iter().zip(step.grads::<B, N>(x, &params, statistics, grad, needed)) {
                if let (Some(node), Some(grad)) = (node, grad) {
                    deliver::<B>(grads, node.id, grad);
                }
            }
        }
    }
}

/// `inputs` are those of [`Linear`].
fn record<B: Products, C: CheckpointStrategy, const N: usize>(
    inputs: [FloatTensor<Autodiff<B, C>>; N],
    how: How,
) -> FloatTensor<Autodiff<B, C>> {
    let tracked = inputs.each_ref().map(|input| input.is_tracked());
    let inputs_end = N - 1 - usize::from(how.bias);
    let (weight, others) = (tracked[N - 1], tracked[..inputs_end].contains(&true));
    let mut tensors = Vec::with_capacity(N);
    let nodes = inputs.map(|input| {
        let (tensor, node) = input.into_parts();
        tensors.push(tensor);
        node
    });
    let w = tensors.pop().expect("a linear layer has a weight");
    let x = tensors.remove(0);
    // Compute-bound: a checkpointing strategy must never repeat an exchange.
    match Linear.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let (plain, again) = (matches!(how.step, Step::None), how.recompute);
            let attention = matches!(how.step, Step::Attention(..));
            let keep = weight && !attention && (plain || !again);
            let Output { y, made, fp8 } = forward::<B>(x.clone(), &tensors, w.clone(), &how, Purpose::Train { keep });
            // The bias is not needed again.
            tensors.truncate(inputs_end - 1);
            let kept = Kept {
                x: (!plain && (others || again)).then_some(x),
                params: tensors,
                out: (keep && fp8.is_none()).then_some(made.out),
                statistics: made.statistics.filter(|_| !again),
                w: others.then_some(w),
                fp8,
                how: How { recompute: again && !plain, ..how },
            };
            prep.finish(kept, y)
        }
        OpsKind::UnTracked(prep) => prep.finish(forward::<B>(x, &tensors, w, &how, Purpose::Evaluate).y),
    }
}

impl<B: Products, C: CheckpointStrategy> FusedOps for Autodiff<B, C> {
    fn op_linear(x: FloatTensor<Self>, w: FloatTensor<Self>, how: How) -> FloatTensor<Self> {
        record::<B, C, 2>([x, w], how)
    }

    fn op_linear_one(x: FloatTensor<Self>, a: FloatTensor<Self>, w: FloatTensor<Self>, how: How) -> FloatTensor<Self> {
        record::<B, C, 3>([x, a, w], how)
    }

    fn op_linear_two(
        x: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        w: FloatTensor<Self>,
        how: How,
    ) -> FloatTensor<Self> {
        record::<B, C, 4>([x, a, b, w], how)
    }

    fn op_linear_three(
        x: FloatTensor<Self>,
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        c: FloatTensor<Self>,
        w: FloatTensor<Self>,
        how: How,
    ) -> FloatTensor<Self> {
        record::<B, C, 5>([x, a, b, c, w], how)
    }
}
