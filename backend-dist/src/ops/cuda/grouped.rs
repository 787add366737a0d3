//! Products of groups of rows, each with a matrix of its own: one launch for all of them, or a cuBLASLt product for
//! each.

use std::ops::Range;

use burn::backend::{DType, TensorMetadata};
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::grouped::{self as kernels, GroupedCall};
use kernels_cubecl::hopper::mma::Half;

use super::blocks::view;
use super::{Float, are_half, columns, empty, launched, rows};
use crate::cuda::lt::{Onto, Operand, multiply, varying};
use crate::cuda::{clear, dense};
use crate::ops::grouped::Way;
use crate::ops::moe::groups;
use crate::profile::{Kind, Operation, Precision, operation};

/// What the copy engine reads and writes starts at a multiple of this.
const START: u64 = 16;

/// The way that was asked for, else one launch for all groups where there is a kernel: by `grouped_check` it is as fast
/// as a product for each of a few large groups, and nearly four times as fast for many small ones.
fn way(asked: Option<Way>, call: GroupedCall, [left, right, out]: [&CubeTensor; 3]) -> Way {
    let start = |x: &CubeTensor| x.handle.offset_start.unwrap_or(0).is_multiple_of(START);
    let has_kernel =
        || are_half([left, right]) && [left, right, out].into_iter().all(start) && call.check(&left.client).is_ok();
    asked.unwrap_or_else(|| if has_kernel() { Way::Kernel } else { Way::Loop })
}

fn call<'a>(counts: &'a [usize], features: usize, inner: usize, like: &CubeTensor) -> GroupedCall<'a> {
    let element = if like.dtype() == DType::F16 { Half::F16 } else { Half::Bf16 };
    GroupedCall { counts, features, inner, element }
}

/// `x_g · w_gᵀ` of each group.
pub fn forward(x: Float, w: Float, counts: &[usize], asked: Option<Way>) -> Float {
    let (x, w) = (dense(x), dense(w));
    let features = rows(&w) / counts.len();
    let call = call(counts, features, columns(&w), &x);
    let out = empty(&x, [rows(&x), features], x.dtype);
    match way(asked, call, [&x, &w, &out]) {
        Way::Kernel => {
            let _noted = noted("forward", &call, &x, 2, false);
            launched("products of groups", call.forward(&x.client, &x.handle, &w.handle, &out.handle));
        }
        Way::Loop => varying(|| {
            for (group, range) in groups(counts) {
                let matrix = Operand::batched(part(&w, group * features..(group + 1) * features)).transposed();
                multiply(Operand::batched(part(&x, range.clone())), matrix, &part(&out, range), Onto::Replace);
            }
        }),
    }
    out
}

/// `grad_g · w_g` of each group.
pub fn input_grad(grad: Float, w: Float, counts: &[usize], asked: Option<Way>) -> Float {
    let (grad, w) = (dense(grad), dense(w));
    let features = rows(&w) / counts.len();
    let call = call(counts, features, columns(&w), &grad);
    let out = empty(&grad, [rows(&grad), columns(&w)], grad.dtype);
    match way(asked, call, [&grad, &w, &out]) {
        Way::Kernel => {
            let _noted = noted("input gradient", &call, &grad, 2, false);
            let done = call.input_gradient(&grad.client, &grad.handle, &w.handle, &out.handle);
            launched("products of groups, gradients of the rows", done);
        }
        Way::Loop => varying(|| {
            for (group, range) in groups(counts) {
                let matrix = Operand::batched(part(&w, group * features..(group + 1) * features));
                multiply(Operand::batched(part(&grad, range.clone())), matrix, &part(&out, range), Onto::Replace);
            }
        }),
    }
    out
}

/// `grad_gᵀ · x_g` of each group, zero for one without rows.
pub fn weight_grad(grad: Float, x: Float, counts: &[usize], asked: Option<Way>) -> Float {
    let out = empty(&x, [counts.len() * columns(&grad), columns(&x)], x.dtype);
    add_weight_grads(dense(grad), dense(x), counts, &out, Onto::Replace, asked);
    out
}

/// [`weight_grad`] written to the f32 elements of `sum`, or added to them.
///
/// # Panics
/// If `sum` is not f32 without gaps with as many elements.
pub fn accumulate_weight_grad(
    grad: Float,
    x: Float,
    counts: &[usize],
    sum: &CubeTensor,
    add: bool,
    asked: Option<Way>,
) {
    let (elements, found) = (counts.len() * columns(&grad) * columns(&x), sum.meta.shape().num_elements());
    assert!(
        found == elements && sum.dtype == DType::F32 && sum.is_contiguous(),
        "gradients of {} experts with {elements} elements in all do not fit a main gradient of {found} {:?}",
        counts.len(),
        sum.dtype
    );
    add_weight_grads(dense(grad), dense(x), counts, sum, if add { Onto::Add } else { Onto::Replace }, asked);
}

/// Gradients of all groups' matrices, below each other in `out`.
fn add_weight_grads(
    grad: CubeTensor,
    x: CubeTensor,
    counts: &[usize],
    out: &CubeTensor,
    onto: Onto,
    asked: Option<Way>,
) {
    let (features, inner) = (columns(&grad), columns(&x));
    let call = call(counts, features, inner, &x);
    if way(asked, call, [&grad, &x, out]) == Way::Kernel {
        let onto = match onto {
            Onto::Add => kernels::Onto::Added,
            Onto::Replace if out.dtype == DType::F32 => kernels::Onto::Wide,
            Onto::Replace => kernels::Onto::Same,
        };
        let _noted = noted("weight gradient", &call, &grad, out.dtype.size(), onto == kernels::Onto::Added);
        let done = call.weight_gradient(&x.client, &grad.handle, &x.handle, &out.handle, onto);
        return launched("products of groups, gradients of the matrices", done);
    }
    let matrix = |group: usize| view(out, [1, features, inner], [0, inner, 1], group * features * inner);
    varying(|| {
        for (group, range) in groups(counts) {
            let grad = Operand::batched(part(&grad, range.clone())).transposed();
            multiply(grad, Operand::batched(part(&x, range)), &matrix(group), onto);
        }
    });
    if onto == Onto::Replace {
        (0..counts.len()).filter(|group| counts[*group] == 0).for_each(|group| clear(&matrix(group)));
    }
}

/// Rows of the matrix `x`, which has no gaps, where they lie.
fn part(x: &CubeTensor, range: Range<usize>) -> CubeTensor {
    let columns = columns(x);
    view(x, [1, range.len(), columns], [0, columns, 1], range.start * columns)
}

/// For a profile: each operand and result once, a result of the weights' size with `size` bytes an element.
fn noted(
    what: &'static str,
    call: &GroupedCall,
    near: &CubeTensor,
    size: usize,
    adds: bool,
) -> Option<crate::profile::Open> {
    operation(near, || {
        let GroupedCall { counts, features, inner, .. } = *call;
        let (rows, groups) = (call.rows(), counts.len());
        let weights = groups * features * inner;
        Operation {
            name: format!("{groups} products [rows, {inner}] · [{inner}, {features}] {what}").into(),
            kind: Kind::Product,
            precision: Precision::Half,
            flops: 2.0 * rows as f64 * (features * inner) as f64,
            bytes: (2 * rows * (features + inner) + weights * size * (1 + usize::from(adds))) as f64,
        }
    })
}
