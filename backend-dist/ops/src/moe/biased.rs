//! Experts with biases and a clamped SwiGLU (gpt-oss), as formulas in Burn's primitives. Every group of rows has its own
//! bias, one after the other in one tensor.

use std::ops::Range;

use burn::backend::{Backend, DType, Scalar, Shape, Slice, TensorMetadata, tensor::FloatTensor as Float};

use super::plain::{groups, size, zeros};
use super::token_all_to_all::rows;
use crate::dtype::{cast, wide};
use crate::kernels::LocalKernels;

/// `(u + 1) g σ(α g)` of `[gate | up]`: `g` is the gate up to a limit, `u` is `up` between its negative and the limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClampedSwiGlu {
    /// Factor in the sigmoid.
    pub alpha: f64,
    /// The limit.
    pub limit: f64,
}

/// The bias `[groups · n]` of each row's group, `[rows, n]` of this type.
fn biases_of_rows<B: Backend>(bias: Float<B>, counts: &[usize], dtype: DType) -> Float<B> {
    let n = bias.shape().num_elements() / counts.len();
    let bias = cast::<B>(B::float_reshape(bias, Shape::from([counts.len(), n])), dtype);
    let part = |(group, range): (usize, Range<usize>)| {
        B::float_expand(rows::<B>(&bias, group..group + 1), Shape::from([range.len(), n]))
    };
    B::float_cat(groups(counts).map(part).collect(), 0)
}

/// The sums of the rows of each group, `[groups · n]`; zeros for an empty one.
fn sums_of_groups<B: LocalKernels>(x: Float<B>, counts: &[usize]) -> Float<B> {
    let n = size(&x)[1];
    let mut sums: Vec<Float<B>> = counts.iter().map(|_| zeros::<B>(&x, [1, n])).collect();
    for (group, range) in groups(counts) {
        sums[group] = B::sum_dim(rows::<B>(&x, range), 0);
    }
    B::float_reshape(B::float_cat(sums, 0), Shape::from([counts.len() * n]))
}

/// `p [rows]` as a column.
fn column<B: Backend>(p: Float<B>) -> Float<B> {
    let count = p.shape()[0];
    B::float_reshape(p, Shape::from([count, 1]))
}

/// The clamped gate and `up`, the sigmoid, and where each was not clamped (1, or 0).
fn clamped<B: Backend>(
    x: Float<B>,
    bias: Float<B>,
    counts: &[usize],
    ClampedSwiGlu { alpha, limit }: ClampedSwiGlu,
) -> [Float<B>; 5] {
    let dtype = wide(x.dtype());
    let x = B::float_add(cast::<B>(x, dtype), biases_of_rows::<B>(bias, counts, dtype));
    let [count, double] = size(&x);
    let half = |range: Range<usize>| B::float_slice(x.clone(), &[Slice::from(0..count), Slice::from(range)]);
    let (gate, up) = (half(0..double / 2), half(double / 2..double));
    let (least, most) = (Scalar::Float(-limit), Scalar::Float(limit));
    let (g, u) = (B::float_clamp_max(gate.clone(), most), B::float_clamp(up.clone(), least, most));
    let is_inside = |x: Float<B>, clamped: &Float<B>| {
        let outside = B::float_abs(B::float_sign(B::float_sub(x, clamped.clone())));
        B::float_add_scalar(B::float_neg(outside), Scalar::Float(1.0))
    };
    let (free_gate, free_up) = (is_inside(gate, &g), is_inside(up, &u));
    let exp = B::float_exp(B::float_mul_scalar(g.clone(), Scalar::Float(-alpha)));
    let sigmoid = B::float_recip(B::float_add_scalar(exp, Scalar::Float(1.0)));
    [g, B::float_add_scalar(u, Scalar::Float(1.0)), sigmoid, free_gate, free_up]
}

pub(crate) fn clamped_swiglu<B: LocalKernels>(
    x: Float<B>,
    bias: Float<B>,
    p: Float<B>,
    counts: &[usize],
    act: ClampedSwiGlu,
) -> Float<B> {
    let dtype = x.dtype();
    let [gate, up, sigmoid, ..] = clamped::<B>(x, bias, counts, act);
    let out = B::float_mul(B::float_mul(gate, sigmoid), up);
    cast::<B>(B::float_mul(out, column::<B>(p)), dtype)
}

/// `d/dg g σ(α g) = σ (1 + α g (1 - σ))`.
pub(crate) fn clamped_swiglu_grads<B: LocalKernels>(
    [x, bias, p]: [Float<B>; 3],
    grad: Float<B>,
    counts: &[usize],
    act: ClampedSwiGlu,
) -> [Float<B>; 3] {
    let ([count, _], dtype) = (size(&x), x.dtype());
    let grad = cast::<B>(grad, wide(dtype));
    let [gate, up, sigmoid, free_gate, free_up] = clamped::<B>(x, bias, counts, act);
    let silu = B::float_mul(gate.clone(), sigmoid.clone());
    let products = B::float_mul(B::float_mul(silu.clone(), up.clone()), grad.clone());
    let p_grad = B::float_reshape(B::sum_dim(products, 1), Shape::from([count]));
    let grad = B::float_mul(grad, column::<B>(p));
    let rest = B::float_add_scalar(B::float_neg(sigmoid.clone()), Scalar::Float(1.0));
    let bend = B::float_mul_scalar(B::float_mul(gate, rest), Scalar::Float(act.alpha));
    let slope = B::float_mul(sigmoid, B::float_add_scalar(bend, Scalar::Float(1.0)));
    let of_gate = B::float_mul(B::float_mul(B::float_mul(grad.clone(), up), slope), free_gate);
    let of_up = B::float_mul(B::float_mul(grad, silu), free_up);
    let x_grad = B::float_cat(vec![of_gate, of_up], 1);
    [cast::<B>(x_grad.clone(), dtype), sums_of_groups::<B>(x_grad, counts), p_grad]
}

pub(crate) fn add_weighted_bias<B: Backend>(y: Float<B>, bias: Float<B>, p: Float<B>, counts: &[usize]) -> Float<B> {
    let dtype = y.dtype();
    let bias = biases_of_rows::<B>(bias, counts, wide(dtype));
    let sum = B::float_add(cast::<B>(y, wide(dtype)), B::float_mul(bias, column::<B>(p)));
    cast::<B>(sum, dtype)
}

pub(crate) fn weighted_bias_grads<B: LocalKernels>(
    grad: Float<B>,
    bias: Float<B>,
    p: Float<B>,
    p_grad: Float<B>,
    counts: &[usize],
) -> [Float<B>; 2] {
    let ([count, _], dtype) = (size(&grad), wide(grad.dtype()));
    let grad = cast::<B>(grad, dtype);
    let products = B::float_mul(biases_of_rows::<B>(bias, counts, dtype), grad.clone());
    let of_p = B::float_reshape(B::sum_dim(products, 1), Shape::from([count]));
    [sums_of_groups::<B>(B::float_mul(grad, column::<B>(p)), counts), B::float_add(p_grad, of_p)]
}
