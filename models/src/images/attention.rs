//! Softmax attention in tensor operations.

use burn::tensor::{Bool, Tensor};

use crate::encoders::attention_weights;

/// `x [batch, length, heads · d]` as `[batch, heads, length, d]`.
pub(super) fn split_heads(x: Tensor<3>, heads: usize) -> Tensor<4> {
    let [batch, length, width] = x.dims();
    x.reshape([batch, length, heads, width / heads]).swap_dims(1, 2)
}

/// `softmax(q kᵀ / √d) v`, `[batch, length, heads · d]`, of `[batch, heads, length, d]` each. Where `hidden` is true,
/// nothing is seen.
pub(super) fn attend(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, hidden: Option<Tensor<4, Bool>>) -> Tensor<3> {
    let [batch, heads, length, d] = q.dims();
    // burn-nn's attention divides by an f32 root, which is 2e-8 off in f64.
    let scores = q.matmul(k.swap_dims(2, 3)) / (d as f64).sqrt();
    attention_weights(scores, hidden).matmul(v).swap_dims(1, 2).reshape([batch, length, heads * d])
}
