//! The operations as formulas in Burn's primitives.

use std::ops::Range;

use burn::backend::{
    Backend, FloatDType, Scalar, Shape, Slice, TensorMetadata,
    tensor::{FloatTensor as Float, IntTensor},
};

use super::token_all_to_all::rows;
use crate::dtype::{cast, wide};
use crate::kernels::LocalKernels;

/// Rows and columns of a matrix.
pub(super) fn size<T: TensorMetadata>(x: &T) -> [usize; 2] {
    let shape = x.shape();
    [shape[0], shape[1]]
}

pub(super) fn zeros<B: Backend>(like: &Float<B>, shape: [usize; 2]) -> Float<B> {
    B::float_zeros(Shape::from(shape), &like.device(), FloatDType::from(like.dtype()))
}

pub(crate) fn sum_rows<B: Backend>(x: Float<B>, index: IntTensor<B>) -> Float<B> {
    let ([_, columns], [count, terms], dtype) = (size(&x), size(&index), x.dtype());
    let x = if terms == 1 { x } else { cast::<B>(x, wide(dtype)) };
    // Index -1 becomes the first row of the table, which is zero.
    let table = B::float_cat(vec![zeros::<B>(&x, [1, columns]), x], 0);
    let index = B::int_add_scalar(index, Scalar::Int(1));
    let term = |j: usize| {
        let column = B::int_slice(index.clone(), &[Slice::from(0..count), Slice::from(j..j + 1)]);
        B::float_select(table.clone(), 0, B::int_reshape(column, Shape::from([count])))
    };
    let sum = (0..terms).map(term).reduce(B::float_add).expect("a table has a column");
    cast::<B>(sum, dtype)
}

/// An activation of each row times its factor, at least in f32 and rounded once.
pub(super) fn weighted<B: LocalKernels>(x: Float<B>, p: Float<B>, act: fn(Float<B>) -> Float<B>) -> Float<B> {
    let ([count, _], dtype) = (size(&x), x.dtype());
    let out = act(cast::<B>(x, wide(dtype)));
    cast::<B>(B::float_mul(out, B::float_reshape(p, Shape::from([count, 1]))), dtype)
}

/// Gradients of [`weighted`] in `x` and `p`; `act_grad` is that of the activation, from its input.
pub(super) fn weighted_grads<B: LocalKernels>(
    x: Float<B>,
    p: Float<B>,
    grad: Float<B>,
    act: fn(Float<B>) -> Float<B>,
    act_grad: fn(Float<B>, Float<B>) -> Float<B>,
) -> [Float<B>; 2] {
    let ([count, _], dtype) = (size(&x), x.dtype());
    let (x, grad) = (cast::<B>(x, wide(dtype)), cast::<B>(grad, wide(dtype)));
    let products = B::float_mul(act(x.clone()), grad.clone());
    let p_grad = B::float_reshape(B::sum_dim(products, 1), Shape::from([count]));
    let grad = B::float_mul(grad, B::float_reshape(p, Shape::from([count, 1])));
    [cast::<B>(act_grad(x, grad), dtype), p_grad]
}

pub(crate) fn weighted_swiglu<B: LocalKernels>(x: Float<B>, p: Float<B>) -> Float<B> {
    weighted::<B>(x, p, B::swiglu_forward)
}

pub(crate) fn weighted_swiglu_grads<B: LocalKernels>(x: Float<B>, p: Float<B>, grad: Float<B>) -> [Float<B>; 2] {
    weighted_grads::<B>(x, p, grad, B::swiglu_forward, B::swiglu_grad)
}

pub(super) fn router_logits<B: LocalKernels>(x: Float<B>, w: Float<B>) -> Float<B> {
    let wide = wide(x.dtype());
    B::linear_forward(cast::<B>(x, wide), cast::<B>(w, wide))
}

pub(crate) fn router_logits_grads<B: LocalKernels>(
    x: Float<B>,
    w: Float<B>,
    grad: Float<B>,
    [of_x, of_w]: [bool; 2],
) -> [Option<Float<B>>; 2] {
    let (dtype, wide) = (x.dtype(), wide(x.dtype()));
    let w = of_x.then(|| cast::<B>(B::linear_input_grad(grad.clone(), cast::<B>(w, wide)), dtype));
    [w, of_w.then(|| B::linear_weight_grad(grad, cast::<B>(x, wide)))]
}

/// Each group that has tokens, with their range.
pub(crate) fn groups(counts: &[usize]) -> impl Iterator<Item = (usize, Range<usize>)> {
    let mut end = 0;
    counts.iter().enumerate().filter_map(move |(group, &count)| {
        end += count;
        (count > 0).then_some((group, end - count..end))
    })
}

pub(super) fn grouped_forward<B: LocalKernels>(x: Float<B>, w: Float<B>, counts: &[usize]) -> Float<B> {
    let out = size(&w)[0] / counts.len();
    let part = |(group, range)| B::linear_forward(rows::<B>(&x, range), rows::<B>(&w, group * out..(group + 1) * out));
    B::float_cat(groups(counts).map(part).collect(), 0)
}

pub(super) fn grouped_input_grad<B: LocalKernels>(grad: Float<B>, w: Float<B>, counts: &[usize]) -> Float<B> {
    let out = size(&w)[0] / counts.len();
    let part =
        |(group, range)| B::linear_input_grad(rows::<B>(&grad, range), rows::<B>(&w, group * out..(group + 1) * out));
    B::float_cat(groups(counts).map(part).collect(), 0)
}

pub(super) fn grouped_weight_grad<B: LocalKernels>(grad: Float<B>, x: Float<B>, counts: &[usize]) -> Float<B> {
    let (out, inner) = (size(&grad)[1], size(&x)[1]);
    let mut parts: Vec<Float<B>> = counts.iter().map(|_| zeros::<B>(&x, [out, inner])).collect();
    for (group, range) in groups(counts) {
        parts[group] = B::linear_weight_grad(rows::<B>(&grad, range.clone()), rows::<B>(&x, range));
    }
    B::float_cat(parts, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_without_rows_are_left_out() {
        let found: Vec<_> = groups(&[2, 0, 3]).collect();
        assert_eq!(found, [(0, 0..2), (2, 2..5)]);
    }
}
