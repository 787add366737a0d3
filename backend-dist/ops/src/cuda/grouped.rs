//! Grouped GEMMs: one kernel launch for all groups, or a cuBLASLt GEMM for each.

use std::ops::Range;

use burn::backend::{DType, TensorMetadata};
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::grouped::{self as kernels, GroupedCall};
use kernels_cubecl::hopper::mma::Half;

use super::blocks::view;
use super::row_biases::add_weighted_bias;
use super::{Float, are_half, columns, empty, launched, rows};
use crate::moe::{TokenGroups, groups as ranges};
use gpu::cuda::lt::{Onto, Operand, multiply};
use gpu::cuda::{clear, dense, flush};
use gpu::profile::{Kind, Operation, Precision, operation};

/// Alignment in bytes of tensors that the kernels access by TMA.
const START: u64 = 16;

/// Thread blocks of GEMMs that share the SMs with collectives, as a multiple of those that fit on the device.
const WAVES: u32 = 8;

/// The implementation of a grouped GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// One kernel launch for all groups; on Hopper, 16-bit numbers, groups of multiples of 128 tokens.
    Kernel,
    /// A cuBLASLt GEMM for each group.
    Loop,
}

/// The requested method, else one launch for all groups if there is a kernel: in `gpu_check grouped` it is as fast as one
/// GEMM per group for a few large groups, and nearly four times as fast for many small ones.
fn method(asked: Option<Method>, call: GroupedCall, [left, right, out]: [&CubeTensor; 3]) -> Method {
    let start = |x: &CubeTensor| x.handle.offset_start.unwrap_or(0).is_multiple_of(START);
    let has_kernel =
        || are_half([left, right]) && [left, right, out].into_iter().all(start) && call.check(&left.client).is_ok();
    asked.unwrap_or_else(|| if has_kernel() { Method::Kernel } else { Method::Loop })
}

fn call<'a>(groups: TokenGroups<'a>, features: usize, inner: usize, like: &CubeTensor) -> GroupedCall<'a> {
    let element = if like.dtype() == DType::F16 { Half::F16 } else { Half::Bf16 };
    let waves = if groups.shares_sms { WAVES } else { 1 };
    GroupedCall { counts: groups.counts, features, inner, element, waves }
}

/// `x_g · w_gᵀ` of each group, plus the group's bias times the row's factor if there are such.
pub fn forward(x: Float, w: Float, groups: TokenGroups, bias: Option<[&Float; 2]>, asked: Option<Method>) -> Float {
    let (x, w) = (dense(x), dense(w));
    let features = rows(&w) / groups.len();
    let call = call(groups, features, columns(&w), &x);
    let out = empty(&x, [rows(&x), features], x.dtype);
    match method(asked, call, [&x, &w, &out]) {
        Method::Kernel => {
            let _noted = noted("forward", &call, &x, 2, false);
            // The host may just have read the counts. The device waits then, and would until 32 commands are queued.
            flush(&x);
            let done = match bias {
                Some(bias) => {
                    let operands = [&x.handle, &w.handle, &out.handle];
                    call.forward_biased(&x.client, operands, bias.map(|part| &part.handle))
                }
                None => call.forward(&x.client, &x.handle, &w.handle, &out.handle),
            };
            launched("grouped GEMM", done);
            flush(&out);
        }
        Method::Loop => {
            for (group, range) in ranges(groups.counts) {
                let matrix = Operand::batched(part(&w, group * features..(group + 1) * features)).transposed();
                multiply(Operand::batched(part(&x, range.clone())), matrix, &part(&out, range), Onto::Replace);
            }
            if let Some(bias) = bias {
                return add_weighted_bias(out, bias, groups.counts);
            }
        }
    }
    out
}

/// `grad_g · w_g` of each group.
pub fn input_grad(grad: Float, w: Float, groups: TokenGroups, asked: Option<Method>) -> Float {
    let (grad, w) = (dense(grad), dense(w));
    let features = rows(&w) / groups.len();
    let call = call(groups, features, columns(&w), &grad);
    let out = empty(&grad, [rows(&grad), columns(&w)], grad.dtype);
    match method(asked, call, [&grad, &w, &out]) {
        Method::Kernel => {
            let _noted = noted("input gradient", &call, &grad, 2, false);
            let done = call.input_gradient(&grad.client, &grad.handle, &w.handle, &out.handle);
            launched("grouped GEMM, input gradients", done);
        }
        Method::Loop => {
            for (group, range) in ranges(groups.counts) {
                let matrix = Operand::batched(part(&w, group * features..(group + 1) * features));
                multiply(Operand::batched(part(&grad, range.clone())), matrix, &part(&out, range), Onto::Replace);
            }
        }
    }
    out
}

/// `grad_gᵀ · x_g` of each group, zero for an empty one.
pub fn weight_grad(grad: Float, x: Float, groups: TokenGroups, asked: Option<Method>) -> Float {
    let out = empty(&x, [groups.len() * columns(&grad), columns(&x)], x.dtype);
    add_weight_grads(dense(grad), dense(x), groups, &out, Onto::Replace, asked);
    out
}

/// [`weight_grad`] written to the f32 elements of `sum`, or added to them.
///
/// # Panics
/// If `sum` is not contiguous f32 with as many elements.
pub fn accumulate_weight_grad(
    grad: Float,
    x: Float,
    groups: TokenGroups,
    sum: &CubeTensor,
    add: bool,
    asked: Option<Method>,
) {
    let (elements, found) = (groups.len() * columns(&grad) * columns(&x), sum.meta.shape().num_elements());
    assert!(
        found == elements && sum.dtype == DType::F32 && sum.is_contiguous(),
        "gradients of {} experts with {elements} elements in all do not fit a main gradient of {found} {:?}",
        groups.len(),
        sum.dtype
    );
    add_weight_grads(dense(grad), dense(x), groups, sum, if add { Onto::Add } else { Onto::Replace }, asked);
}

/// Gradients of all groups' weights, one after the other in `out`.
fn add_weight_grads(
    grad: CubeTensor,
    x: CubeTensor,
    groups: TokenGroups,
    out: &CubeTensor,
    onto: Onto,
    asked: Option<Method>,
) {
    let (features, inner) = (columns(&grad), columns(&x));
    let call = call(groups, features, inner, &x);
    if method(asked, call, [&grad, &x, out]) == Method::Kernel {
        let onto = match onto {
            Onto::Add => kernels::Epilogue::AddFp32,
            Onto::Replace if out.dtype == DType::F32 => kernels::Epilogue::Fp32,
            Onto::Replace => kernels::Epilogue::InputType,
        };
        let _noted = noted("weight gradient", &call, &grad, out.dtype.size(), onto == kernels::Epilogue::AddFp32);
        let done = call.weight_gradient(&x.client, &grad.handle, &x.handle, &out.handle, onto);
        return launched("grouped GEMM, weight gradients", done);
    }
    let matrix = |group: usize| view(out, [1, features, inner], [0, inner, 1], group * features * inner);
    for (group, range) in ranges(groups.counts) {
        let grad = Operand::batched(part(&grad, range.clone())).transposed();
        multiply(grad, Operand::batched(part(&x, range)), &matrix(group), onto);
    }
    if onto == Onto::Replace {
        (0..groups.len()).filter(|group| groups.counts[*group] == 0).for_each(|group| clear(&matrix(group)));
    }
}

/// Rows of the contiguous matrix `x`, in place.
fn part(x: &CubeTensor, range: Range<usize>) -> CubeTensor {
    let columns = columns(x);
    view(x, [1, range.len(), columns], [0, columns, 1], range.start * columns)
}

/// For a profile: each operand and output once, with `size` bytes per element of the weights' gradients.
fn noted(
    what: &'static str,
    call: &GroupedCall,
    near: &CubeTensor,
    size: usize,
    adds: bool,
) -> Option<gpu::profile::Open> {
    operation(near, || {
        let GroupedCall { counts, features, inner, .. } = *call;
        let (rows, groups) = (call.rows(), counts.len());
        let weights = groups * features * inner;
        Operation {
            name: format!("{groups} GEMMs [rows, {inner}] · [{inner}, {features}] {what}").into(),
            kind: Kind::Gemm,
            precision: Precision::Half,
            flops: 2.0 * rows as f64 * (features * inner) as f64,
            bytes: (2 * rows * (features + inner) + weights * size * (1 + usize::from(adds))) as f64,
        }
    })
}
