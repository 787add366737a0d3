//! The GEMM of a linear layer, with the collective of its input and the collective of its output.

use burn::backend::{
    Backend, Flex,
    autodiff::{NodeId, grads::Gradients},
    tensor::FloatTensor as Float,
};

use crate::{
    context::{kernels::ContextKernels, p2p::PointToPoint},
    fp8::Fp8Kernels,
    kernels::LocalKernels,
    main_grads::main_grad,
    plain,
    residual::ResidualKernels,
    weight_grads::Deferral,
};
use ranks::collective_ops::{Collective, CollectiveOps};
use ranks::comm::{Group, ReduceOp};

/// The collective on the input of a linear layer.
#[derive(Clone, Debug, Default)]
pub enum InputCollective {
    /// None: the rank's input is local.
    #[default]
    None,
    /// Forward nothing: all ranks have the same input. Backward an all-reduce sums their gradients.
    Copy(Group),
    /// Each rank has its shard of the sequence (dimension 0): forward an all-gather, backward a reduce-scatter.
    AllGather(Group),
}

/// The collective on the output of a linear layer's GEMM.
#[derive(Clone, Debug, Default)]
pub enum OutputCollective {
    /// None: the output is local.
    #[default]
    None,
    /// The output is a partial sum: forward an all-reduce, backward nothing.
    AllReduce(Group),
    /// The output is a partial sum: forward a reduce-scatter along the sequence (dimension 0), backward an all-gather.
    ReduceScatter(Group),
}

/// The collectives of a linear layer.
#[derive(Clone, Debug, Default)]
pub(crate) struct LinearCollectives {
    pub entry: InputCollective,
    pub exit: OutputCollective,
    /// Overlap the collectives with the GEMMs where the backend can.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "CPU ranks do one after the other"))]
    pub overlap: bool,
}

/// A weight that needs a gradient.
pub(crate) struct Weight<B: Backend> {
    pub id: NodeId,
    /// Whether its gradient is deferred, as a zero-bubble schedule may where nothing waits for it.
    pub deferral: Deferral,
    /// The layer's input, before the input collective.
    pub input: Float<B>,
}

impl LinearCollectives {
    /// Whether the layer's gradients are complete without other ranks.
    pub(crate) fn are_local(&self) -> bool {
        let entry = match &self.entry {
            InputCollective::None => true,
            InputCollective::Copy(group) | InputCollective::AllGather(group) => group.size() == 1,
        };
        entry && self.exit.is_whole()
    }
}

impl InputCollective {
    pub(crate) fn forward<B: CollectiveOps>(&self, x: Float<B>) -> Float<B> {
        match self {
            Self::AllGather(group) => collective::<B>(x, Collective::AllGather(0), group),
            Self::None | Self::Copy(_) => x,
        }
    }

    pub(crate) fn backward<B: CollectiveOps>(&self, grad: Float<B>) -> Float<B> {
        match self {
            Self::None => grad,
            Self::Copy(group) => collective::<B>(grad, Collective::AllReduce(ReduceOp::Sum), group),
            Self::AllGather(group) => collective::<B>(grad, Collective::ReduceScatter(0), group),
        }
    }
}

impl OutputCollective {
    pub(crate) fn forward<B: CollectiveOps>(&self, y: Float<B>) -> Float<B> {
        match self {
            Self::None => y,
            Self::AllReduce(group) => collective::<B>(y, Collective::AllReduce(ReduceOp::Sum), group),
            Self::ReduceScatter(group) => collective::<B>(y, Collective::ReduceScatter(0), group),
        }
    }

    pub(crate) fn backward<B: CollectiveOps>(&self, grad: Float<B>) -> Float<B> {
        match self {
            Self::None | Self::AllReduce(_) => grad,
            Self::ReduceScatter(group) => collective::<B>(grad, Collective::AllGather(0), group),
        }
    }

    /// Whether the GEMM's output is complete without other ranks.
    pub(crate) fn is_whole(&self) -> bool {
        match self {
            Self::None => true,
            Self::AllReduce(group) | Self::ReduceScatter(group) => group.size() == 1,
        }
    }
}

fn collective<B: CollectiveOps>(x: Float<B>, collective: Collective, group: &Group) -> Float<B> {
    if group.size() == 1 { x } else { B::collective(x, collective, None, group.clone()) }
}

/// GEMMs with their collectives, one after the other unless the backend overlaps them.
pub(crate) trait Gemms: Fp8Kernels + ResidualKernels + ContextKernels + PointToPoint {
    /// `x · wᵀ` between the two `collectives`; the bias is added once the output is complete.
    fn gemm(x: Float<Self>, w: Float<Self>, bias: Option<Float<Self>>, collectives: &LinearCollectives) -> Float<Self> {
        forward::<Self>(x, w, bias, collectives)
    }

    /// Delivers the gradient of `weight`, now or deferred. Returns the gradient of the input if the weight's values `w`
    /// are given; `grad` is the gradient of [`gemm`](Self::gemm)'s output.
    fn gemm_grads(
        grad: Float<Self>,
        w: Option<Float<Self>>,
        weight: Option<Weight<Self>>,
        collectives: &LinearCollectives,
        grads: &mut Gradients,
    ) -> Option<Float<Self>> {
        backward::<Self>(grad, w, weight, collectives, grads)
    }
}

impl Gemms for Flex {}

/// [`Gemms::gemm`], step by step.
pub(crate) fn forward<B: LocalKernels + CollectiveOps>(
    x: Float<B>,
    w: Float<B>,
    bias: Option<Float<B>>,
    collectives: &LinearCollectives,
) -> Float<B> {
    let x = collectives.entry.forward::<B>(x);
    match bias {
        None => collectives.exit.forward::<B>(B::linear_forward(x, w)),
        Some(bias) if collectives.exit.is_whole() => B::linear_bias_forward(x, w, bias),
        Some(bias) => plain::linear::add_bias::<B>(collectives.exit.forward::<B>(B::linear_forward(x, w)), bias),
    }
}

/// [`Gemms::gemm_grads`], step by step.
pub(crate) fn backward<B: LocalKernels + CollectiveOps>(
    grad: Float<B>,
    w: Option<Float<B>>,
    weight: Option<Weight<B>>,
    collectives: &LinearCollectives,
    grads: &mut Gradients,
) -> Option<Float<B>> {
    let grad = collectives.exit.backward::<B>(grad);
    weight_grad::<B>(grad.clone(), weight, &collectives.entry, grads);
    w.map(|w| collectives.entry.backward::<B>(B::linear_input_grad(grad, w)))
}

/// Delivers the gradient of `weight`, now or deferred; `grad` is the gradient of the GEMM's output.
pub(crate) fn weight_grad<B: LocalKernels + CollectiveOps>(
    grad: Float<B>,
    weight: Option<Weight<B>>,
    entry: &InputCollective,
    grads: &mut Gradients,
) {
    let Some(Weight { id, deferral, input }) = weight else { return };
    let entry = entry.clone();
    deferral.run(grads, move |grads| deliver_weight_grad::<B>(grads, id, grad, entry.forward::<B>(input)));
}

/// Delivers `gradᵀ · x` to the leaf or inner node `id`.
pub(crate) fn deliver_weight_grad<B: LocalKernels>(grads: &mut Gradients, id: NodeId, grad: Float<B>, x: Float<B>) {
    match main_grad::<B>(id) {
        Some((sum, add)) => B::linear_accumulate_weight_grad(grad, x, &sum, add),
        None => grads.register::<B>(id, B::linear_weight_grad(grad, x)),
    }
}
