//! The product of a linear layer between the exchanges in front of it and behind it.

use burn::backend::{
    Backend, Flex,
    autodiff::{NodeId, grads::Gradients},
    tensor::FloatTensor,
};

use super::{
    context::{kernels::ContextKernels, neighbours::Neighbours},
    fp8::Fp8Kernels,
    kernels::LocalKernels,
    main_grads::place,
    plain,
    residual::ResidualKernels,
    weight_grads::run_or_defer,
};
use crate::comm::{Group, ReduceOp};
use crate::exchange::{Exchange, ExchangeOps};

/// How the input of a linear layer comes to a rank that computes some of the outputs, or from some of the inputs.
#[derive(Clone, Debug, Default)]
pub enum Entry {
    /// The rank's input is its own.
    #[default]
    Own,
    /// All ranks have the same input; its gradient is the sum of theirs.
    Copied(Group),
    /// Each rank has its part of the sequence, dimension 0, and needs all of it; the sum of the gradients is cut again.
    Gathered(Group),
}

/// What becomes of the product of a linear layer.
#[derive(Clone, Debug, Default)]
pub enum Exit {
    /// It is the rank's own.
    #[default]
    Own,
    /// It is a summand: all ranks get the sum of theirs, whose gradient is the gradient of each.
    Reduced(Group),
    /// It is a summand: each rank gets its part of the sequence, dimension 0, of the sum; the gradients are joined
    /// again.
    Scattered(Group),
}

/// The exchanges of a linear layer.
#[derive(Clone, Debug, Default)]
pub(super) struct Ends {
    pub entry: Entry,
    pub exit: Exit,
    /// They run beside the products where a backend can do that.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "CPU ranks do one after the other"))]
    pub overlap: bool,
}

/// A weight that wants a gradient.
pub(super) struct Weight<B: Backend> {
    pub id: NodeId,
    /// Nothing waits for its gradient: a zero-bubble schedule may put it off.
    pub is_leaf: bool,
    /// The layer's input, as it was in front of its entry.
    pub input: FloatTensor<B>,
}

impl Entry {
    pub(super) fn forward<B: ExchangeOps>(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        match self {
            Self::Gathered(group) => exchange::<B>(x, Exchange::AllGather(0), group),
            Self::Own | Self::Copied(_) => x,
        }
    }

    pub(super) fn backward<B: ExchangeOps>(&self, grad: FloatTensor<B>) -> FloatTensor<B> {
        match self {
            Self::Own => grad,
            Self::Copied(group) => exchange::<B>(grad, Exchange::AllReduce(ReduceOp::Sum), group),
            Self::Gathered(group) => exchange::<B>(grad, Exchange::ReduceScatter(0), group),
        }
    }
}

impl Exit {
    pub(super) fn forward<B: ExchangeOps>(&self, y: FloatTensor<B>) -> FloatTensor<B> {
        match self {
            Self::Own => y,
            Self::Reduced(group) => exchange::<B>(y, Exchange::AllReduce(ReduceOp::Sum), group),
            Self::Scattered(group) => exchange::<B>(y, Exchange::ReduceScatter(0), group),
        }
    }

    pub(super) fn backward<B: ExchangeOps>(&self, grad: FloatTensor<B>) -> FloatTensor<B> {
        match self {
            Self::Own | Self::Reduced(_) => grad,
            Self::Scattered(group) => exchange::<B>(grad, Exchange::AllGather(0), group),
        }
    }

    /// Whether the product is complete without other ranks.
    pub(super) fn is_whole(&self) -> bool {
        match self {
            Self::Own => true,
            Self::Reduced(group) | Self::Scattered(group) => group.size() == 1,
        }
    }
}

fn exchange<B: ExchangeOps>(x: FloatTensor<B>, exchange: Exchange, group: &Group) -> FloatTensor<B> {
    if group.size() == 1 { x } else { B::exchange(x, exchange, None, group.clone()) }
}

/// Products with their exchanges, one after the other unless a backend knows better.
pub(super) trait Products: Fp8Kernels + ResidualKernels + ContextKernels + Neighbours {
    /// `x · wᵀ` with the exchanges of `ends` around it; the bias is added once the product is complete.
    fn product(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        ends: &Ends,
    ) -> FloatTensor<Self> {
        forward::<Self>(x, w, bias, ends)
    }

    /// Brings the gradient of `weight` to its place, now or later, and gives the gradient of the input if the weight's
    /// values `w` are given; `grad` is the gradient of [`product`](Self::product)'s result.
    fn product_grads(
        grad: FloatTensor<Self>,
        w: Option<FloatTensor<Self>>,
        weight: Option<Weight<Self>>,
        ends: &Ends,
        grads: &mut Gradients,
    ) -> Option<FloatTensor<Self>> {
        backward::<Self>(grad, w, weight, ends, grads)
    }
}

impl Products for Flex {}

/// [`Products::product`], step by step.
pub(super) fn forward<B: LocalKernels + ExchangeOps>(
    x: FloatTensor<B>,
    w: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    ends: &Ends,
) -> FloatTensor<B> {
    let x = ends.entry.forward::<B>(x);
    match bias {
        None => ends.exit.forward::<B>(B::linear_forward(x, w)),
        Some(bias) if ends.exit.is_whole() => B::linear_bias_forward(x, w, bias),
        Some(bias) => plain::linear::add_bias::<B>(ends.exit.forward::<B>(B::linear_forward(x, w)), bias),
    }
}

/// [`Products::product_grads`], step by step.
pub(super) fn backward<B: LocalKernels + ExchangeOps>(
    grad: FloatTensor<B>,
    w: Option<FloatTensor<B>>,
    weight: Option<Weight<B>>,
    ends: &Ends,
    grads: &mut Gradients,
) -> Option<FloatTensor<B>> {
    let grad = ends.exit.backward::<B>(grad);
    weight_grad::<B>(grad.clone(), weight, &ends.entry, grads);
    w.map(|w| ends.entry.backward::<B>(B::linear_input_grad(grad, w)))
}

/// Brings the gradient of `weight` to its place, now or later; `grad` is the gradient of the product.
pub(super) fn weight_grad<B: LocalKernels + ExchangeOps>(
    grad: FloatTensor<B>,
    weight: Option<Weight<B>>,
    entry: &Entry,
    grads: &mut Gradients,
) {
    let Some(Weight { id, is_leaf, input }) = weight else { return };
    let entry = entry.clone();
    let job = move |grads: &mut Gradients| deliver_weight_grad::<B>(grads, id, grad, entry.forward::<B>(input));
    if is_leaf { run_or_defer(grads, job) } else { job(grads) }
}

/// Brings `gradᵀ · x` to the place of the leaf or inner node `id`.
pub(super) fn deliver_weight_grad<B: LocalKernels>(
    grads: &mut Gradients,
    id: NodeId,
    grad: FloatTensor<B>,
    x: FloatTensor<B>,
) {
    match place::<B>(id) {
        Some((sum, add)) => B::linear_accumulate_weight_grad(grad, x, &sum, add),
        None => grads.register::<B>(id, B::linear_weight_grad(grad, x)),
    }
}
