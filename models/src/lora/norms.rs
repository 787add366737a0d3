//! Merged weights and their norms, by which DoRA divides magnitudes.

use backend_dist::collective::all_reduce;
use backend_dist::comm::{Group, ReduceOp};
use backend_dist::ops::{matmul, sum_dim};
use burn::tensor::{DType, Tensor};

/// `W + s B A`.
pub(super) fn merged(w: Tensor<2>, a: Tensor<2>, b: Tensor<2>, scale: f64) -> Tensor<2> {
    w + matmul(b, a).mul_scalar(scale)
}

/// The norm of each matrix row, of which the ranks of `group` have some columns each; at least in fp32.
pub(super) fn row_norms(w: Tensor<2>, group: Option<&Group>) -> Tensor<1> {
    let rows = w.dims()[0];
    summed(squares(w, 1), group).sqrt().reshape([rows])
}

/// Sums of squares of the rows of experts' matrices, `[experts, rows]`; at least in fp32.
pub(super) fn squares(w: Tensor<2>, experts: usize) -> Tensor<2> {
    let w = if w.dtype().size() < 4 { w.cast(DType::F32) } else { w };
    let rows = w.dims()[0];
    sum_dim(w.clone() * w, 1).reshape([experts, rows / experts])
}

/// Over the ranks that have columns each.
pub(super) fn summed(squares: Tensor<2>, group: Option<&Group>) -> Tensor<2> {
    match group.filter(|group| group.size() > 1) {
        Some(group) => all_reduce(squares, ReduceOp::Sum, group),
        None => squares,
    }
}

/// A magnitude divided by a norm that has no gradient.
pub(super) fn divided(magnitude: Tensor<1>, norms: Tensor<1>) -> Tensor<1> {
    let inverse = norms.recip().cast(magnitude.dtype());
    if magnitude.device().is_autodiff() { magnitude * Tensor::from_inner(inverse) } else { magnitude * inverse }
}
