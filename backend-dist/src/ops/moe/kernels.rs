//! What mixture-of-experts operations need of a backend.

use burn::backend::tensor::{FloatTensor, IntTensor};

use super::plain;
use crate::exchange::ExchangeOps;
use crate::ops::kernels::LocalKernels;

/// Forward and gradients on a backend without autodiff. Shapes are checked by the public functions; the default bodies are
/// the formulas in Burn's primitives.
pub(in crate::ops) trait MoeKernels: LocalKernels + ExchangeOps {
    /// Row `i` of the result is `Σ_j x[index[i, j]]`, added in this order, at least in f32; a negative index is no row.
    /// `x [rows, n]`, `index [m, terms]`, result `[m, n]`.
    fn sum_rows(x: FloatTensor<Self>, index: IntTensor<Self>) -> FloatTensor<Self> {
        plain::sum_rows::<Self>(x, index)
    }

    /// `silu(gate) up p` of `x [rows, 2 n] = [gate | up]` and `p [rows]`, at least in f32 and rounded once.
    fn weighted_swiglu(x: FloatTensor<Self>, p: FloatTensor<Self>) -> FloatTensor<Self> {
        plain::weighted_swiglu::<Self>(x, p)
    }

    /// Gradients of [`weighted_swiglu`](Self::weighted_swiglu) in `x` and `p`.
    fn weighted_swiglu_grads(
        x: FloatTensor<Self>,
        p: FloatTensor<Self>,
        grad: FloatTensor<Self>,
    ) -> [FloatTensor<Self>; 2] {
        plain::weighted_swiglu_grads::<Self>(x, p, grad)
    }

    /// `x · wᵀ`, at least in f32.
    fn router_logits(x: FloatTensor<Self>, w: FloatTensor<Self>) -> FloatTensor<Self> {
        plain::router_logits::<Self>(x, w)
    }

    /// A product `x_g · w_gᵀ` for each group of rows; groups without rows have none.
    fn grouped_forward(x: FloatTensor<Self>, w: FloatTensor<Self>, counts: &[usize]) -> FloatTensor<Self> {
        plain::grouped_forward::<Self>(x, w, counts)
    }

    /// Gradient of [`grouped_forward`](Self::grouped_forward) in `x`: `grad_g · w_g`.
    fn grouped_input_grad(grad: FloatTensor<Self>, w: FloatTensor<Self>, counts: &[usize]) -> FloatTensor<Self> {
        plain::grouped_input_grad::<Self>(grad, w, counts)
    }

    /// Gradient of [`grouped_forward`](Self::grouped_forward) in `w`: `grad_gᵀ · x_g`, zero for a group without rows.
    fn grouped_weight_grad(grad: FloatTensor<Self>, x: FloatTensor<Self>, counts: &[usize]) -> FloatTensor<Self> {
        plain::grouped_weight_grad::<Self>(grad, x, counts)
    }

    /// Writes [`grouped_weight_grad`](Self::grouped_weight_grad) to the f32 elements of `sum`, or adds it to them.
    fn grouped_accumulate_weight_grad(
        grad: FloatTensor<Self>,
        x: FloatTensor<Self>,
        counts: &[usize],
        sum: &FloatTensor<Self>,
        add: bool,
    ) {
        Self::accumulate(Self::grouped_weight_grad(grad, x, counts), sum, add);
    }
}
