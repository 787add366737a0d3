//! Norms fused with the additions next to them.

use burn::backend::{Flex, tensor::FloatTensor as Float};

use crate::{
    kernels::{LocalKernels, NormGrads, NormNeeds},
    saved_attention::CoreAttention,
    step::Step,
};
use ranks::collective_ops::{Collective, CollectiveOps};
use ranks::comm::{Group, ReduceOp};

/// Additions that a backend may fuse with a norm; the default bodies run one after the other. `norm` is RMSNorm or
/// LayerNorm, `params` its weight, and bias if it has one.
pub trait ResidualKernels: LocalKernels + CollectiveOps {
    /// `x + other`, and the norm of the sum.
    fn norm_of_sum(x: Float<Self>, other: Float<Self>, norm: Step, params: &[Float<Self>]) -> [Float<Self>; 2] {
        norm_of_sum::<Self>(x, other, norm, params)
    }

    /// `x` plus the sum of all members' `partial`, and the norm of that. `next` is what is read then, if that is known.
    fn norm_of_reduced(
        x: Float<Self>,
        partial: Float<Self>,
        norm: Step,
        params: &[Float<Self>],
        _next: Option<&Float<Self>>,
        group: &Group,
    ) -> [Float<Self>; 2] {
        Self::norm_of_sum(x, reduced::<Self>(partial, group), norm, params)
    }

    /// The gradients of the norm of `x`, with `other` added to that of `x`.
    fn norm_grads_plus(
        x: Float<Self>,
        norm: Step,
        params: &[Float<Self>],
        grad: Float<Self>,
        other: Float<Self>,
        needs: NormNeeds,
    ) -> NormGrads<Self> {
        norm_grads_plus::<Self>(x, norm, params, grad, other, needs)
    }
}

impl ResidualKernels for Flex {}

/// The sum of all members' `partial`.
pub fn reduced<B: CollectiveOps>(partial: Float<B>, group: &Group) -> Float<B> {
    match group.size() {
        1 => partial,
        _ => B::collective(partial, Collective::AllReduce(ReduceOp::Sum), None, group.clone()),
    }
}

/// [`ResidualKernels::norm_of_sum`], one after the other.
pub fn norm_of_sum<B: LocalKernels>(x: Float<B>, other: Float<B>, norm: Step, params: &[Float<B>]) -> [Float<B>; 2] {
    let sum = B::float_add(x, other);
    [sum.clone(), norm.forward::<B>(sum, params, &CoreAttention::Compute).out]
}

/// [`ResidualKernels::norm_grads_plus`], one after the other.
pub fn norm_grads_plus<B: LocalKernels>(
    x: Float<B>,
    norm: Step,
    params: &[Float<B>],
    grad: Float<B>,
    other: Float<B>,
    needs: NormNeeds,
) -> NormGrads<B> {
    let NormGrads { x, w, b } = norm.norm_grads::<B>(x, params, grad, needs);
    NormGrads { x: x.map(|x| B::float_add(x, other)), w, b }
}
