//! The backend kernels of MoE operations.

use std::ops::Range;

use burn::backend::tensor::{FloatTensor as Float, IntTensor};
use burn::backend::{Flex, Shape, TensorMetadata};
use burn::tensor::{Int, Tensor};

use super::biased::{self, ClampedSwiGlu};
use super::plain;
use super::token_all_to_all::{self, TokenAllToAll};
use crate::kernels::LocalKernels;
use ranks::collective_ops::CollectiveOps;

/// The groups of a grouped GEMM.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenGroups<'a> {
    /// Tokens of each.
    pub counts: &'a [usize],
    /// Collectives take some SMs while it runs.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "CPU ranks have no SMs"))]
    pub shares_sms: bool,
}

impl<'a> TokenGroups<'a> {
    /// The GEMM has the device for itself.
    pub fn alone(counts: &'a [usize]) -> Self {
        Self { counts, shares_sms: false }
    }

    /// Number of groups.
    #[cfg(feature = "cuda")]
    pub fn len(&self) -> usize {
        self.counts.len()
    }
}

/// Forward and gradients on a backend without autodiff. Shapes are checked by the public functions; the default bodies
/// are the formulas in Burn's primitives.
pub(crate) trait MoeKernels: LocalKernels + CollectiveOps + TokenAllToAll {
    /// An index table as a primitive of this backend.
    fn table(table: &Tensor<2, Int>) -> IntTensor<Self>;

    /// Rows of `x`, reshaped to this many columns. No copy on backends that accumulate in place.
    fn rows_in_place(x: &Float<Self>, rows: Range<usize>, columns: usize) -> Float<Self> {
        let all = x.shape().num_elements() / columns;
        token_all_to_all::rows::<Self>(&Self::float_reshape(x.clone(), Shape::from([all, columns])), rows)
    }

    /// Row `i` of the output is `Σ_j x[index[i, j]]`, added in this order, at least in f32; negative indices are
    /// skipped. `x [rows, n]`, `index [m, terms]`, output `[m, n]`.
    fn sum_rows(x: Float<Self>, index: IntTensor<Self>) -> Float<Self> {
        plain::sum_rows::<Self>(x, index)
    }

    /// `silu(gate) up p` of `x [rows, 2 n] = [gate | up]` and `p [rows]`, at least in f32 and rounded once.
    fn weighted_swiglu(x: Float<Self>, p: Float<Self>) -> Float<Self> {
        plain::weighted_swiglu::<Self>(x, p)
    }

    /// Gradients of [`weighted_swiglu`](Self::weighted_swiglu) in `x` and `p`.
    fn weighted_swiglu_grads(x: Float<Self>, p: Float<Self>, grad: Float<Self>) -> [Float<Self>; 2] {
        plain::weighted_swiglu_grads::<Self>(x, p, grad)
    }

    /// `x · wᵀ`, at least in f32.
    fn router_logits(x: Float<Self>, w: Float<Self>) -> Float<Self> {
        plain::router_logits::<Self>(x, w)
    }

    /// Gradients of [`router_logits`](Self::router_logits) in `x`, of its type, and in `w`, at least in f32: those that
    /// are needed.
    fn router_logits_grads(
        x: Float<Self>,
        w: Float<Self>,
        grad: Float<Self>,
        needed: [bool; 2],
    ) -> [Option<Float<Self>>; 2] {
        plain::router_logits_grads::<Self>(x, w, grad, needed)
    }

    /// A GEMM `x_g · w_gᵀ` for each group of tokens; empty groups have none.
    fn grouped_forward(x: Float<Self>, w: Float<Self>, groups: TokenGroups) -> Float<Self> {
        plain::grouped_forward::<Self>(x, w, groups.counts)
    }

    /// Gradient of [`grouped_forward`](Self::grouped_forward) in `x`: `grad_g · w_g`.
    fn grouped_input_grad(grad: Float<Self>, w: Float<Self>, groups: TokenGroups) -> Float<Self> {
        plain::grouped_input_grad::<Self>(grad, w, groups.counts)
    }

    /// Gradient of [`grouped_forward`](Self::grouped_forward) in `w`: `grad_gᵀ · x_g`, zero for an empty group.
    fn grouped_weight_grad(grad: Float<Self>, x: Float<Self>, groups: TokenGroups) -> Float<Self> {
        plain::grouped_weight_grad::<Self>(grad, x, groups.counts)
    }

    /// Writes [`grouped_weight_grad`](Self::grouped_weight_grad) to the f32 elements of `sum`, or adds it to them.
    fn grouped_accumulate_weight_grad(
        grad: Float<Self>,
        x: Float<Self>,
        groups: TokenGroups,
        sum: &Float<Self>,
        add: bool,
    ) {
        Self::accumulate(Self::grouped_weight_grad(grad, x, groups), sum, add);
    }
}

/// The kernels of experts with biases; the default bodies are the formulas in Burn's primitives.
pub(crate) trait BiasKernels: MoeKernels {
    /// `act(x + bias) p` of `x [rows, 2 n]` and `p [rows]`, at least in f32 and rounded once.
    fn clamped_swiglu(
        x: Float<Self>,
        bias: Float<Self>,
        p: Float<Self>,
        counts: &[usize],
        act: ClampedSwiGlu,
    ) -> Float<Self> {
        biased::clamped_swiglu::<Self>(x, bias, p, counts, act)
    }

    /// Gradients of [`clamped_swiglu`](Self::clamped_swiglu) in `x`, in the bias, at least in f32, and in `p`.
    fn clamped_swiglu_grads(
        [x, bias, p]: [Float<Self>; 3],
        grad: Float<Self>,
        counts: &[usize],
        act: ClampedSwiGlu,
    ) -> [Float<Self>; 3] {
        biased::clamped_swiglu_grads::<Self>([x, bias, p], grad, counts, act)
    }

    /// [`grouped_forward`](MoeKernels::grouped_forward) `+ bias p`.
    fn biased_forward(x: Float<Self>, w: Float<Self>, [bias, p]: [Float<Self>; 2], groups: TokenGroups) -> Float<Self> {
        biased::add_weighted_bias::<Self>(Self::grouped_forward(x, w, groups), bias, p, groups.counts)
    }

    /// The gradient of the bias in [`biased_forward`](Self::biased_forward), at least in f32, and `p_grad` plus
    /// that of `p`.
    fn weighted_bias_grads(
        grad: Float<Self>,
        bias: Float<Self>,
        p: Float<Self>,
        p_grad: Float<Self>,
        counts: &[usize],
    ) -> [Float<Self>; 2] {
        biased::weighted_bias_grads::<Self>(grad, bias, p, p_grad, counts)
    }
}

impl BiasKernels for Flex {}
