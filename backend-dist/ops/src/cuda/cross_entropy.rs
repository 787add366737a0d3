//! The local steps of the vocabulary-parallel cross-entropy; statistics are f32.

use burn::backend::{Cube, DType, FloatDType, TensorMetadata, ops::FloatTensorOps};
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::pointwise::cross_entropy::{self as kernels, LogitsShape};

use super::{Float, Int, are_half, columns, empty, ids, launched, packed, rows};
use crate::plain;

fn shape_of(logits: &CubeTensor, first_row: usize, valid: usize) -> Option<LogitsShape> {
    let shape = LogitsShape { rows: rows(logits), columns: columns(logits), valid, first_row };
    (are_half([logits]) && shape.has_kernel()).then_some(shape)
}

fn f32(x: Float) -> CubeTensor {
    packed(if x.dtype() == DType::F32 { x } else { Cube::float_cast(x, FloatDType::F32) })
}

pub fn maximum(logits: Float, valid: usize) -> Float {
    let Some(shape) = shape_of(&logits, 0, valid) else {
        return plain::cross_entropy::maximum::<Cube>(logits, valid);
    };
    let logits = packed(logits);
    let dims = logits.shape();
    let out = empty(&logits, [dims[0], dims[1]], DType::F32);
    let done = by_half!(logits, E => kernels::maximum::<E>(&logits.client, &logits.handle, &out.handle, shape));
    launched("cross-entropy maximum", done);
    out
}

pub fn sums(logits: Float, max: Float, labels: Int, first_row: usize, valid: usize) -> Float {
    let Some(shape) = shape_of(&logits, first_row, valid) else {
        return plain::cross_entropy::sums::<Cube>(logits, max, labels, first_row, valid);
    };
    run_sums(packed(logits), &f32(max), labels, shape, false)
}

/// Maxima and sums in one pass.
pub fn statistics(logits: Float, labels: Int, first_row: usize, valid: usize) -> [Float; 2] {
    let Some(shape) = shape_of(&logits, first_row, valid) else {
        let max = plain::cross_entropy::maximum::<Cube>(logits.clone(), valid);
        let sums = plain::cross_entropy::sums::<Cube>(logits, max.clone(), labels, first_row, valid);
        return [max, sums];
    };
    let dims = logits.shape();
    let max = empty(&logits, [dims[0], dims[1]], DType::F32);
    let sums = run_sums(packed(logits), &max, labels, shape, true);
    [max, sums]
}

fn run_sums(logits: Float, max: &CubeTensor, labels: Int, shape: LogitsShape, find: bool) -> Float {
    let (dims, labels) = (logits.shape(), ids(labels));
    let out = empty(&logits, [2, dims[0], dims[1]], DType::F32);
    let targets = (&max.handle, &out.handle);
    let done = by_half!(logits, E => {
        kernels::sums::<E>(&logits.client, &logits.handle, &labels.handle, targets, shape, find)
    });
    launched("cross-entropy sums", done);
    out
}

/// `statistics` are the log-sum-exp and the gradient of the loss. Logits without another owner are overwritten: they
/// are the largest tensor of a step.
pub fn logits_grad(logits: Float, statistics: [Float; 2], labels: Int, first_row: usize, valid: usize) -> Float {
    let Some(shape) = shape_of(&logits, first_row, valid) else {
        let [lse, grad] = statistics;
        return plain::cross_entropy::logits_grad::<Cube>(logits, lse, labels, grad, first_row, valid);
    };
    let logits = packed(logits);
    let ([lse, slope], labels) = (statistics.map(f32), ids(labels));
    let fresh = (!logits.can_mut()).then(|| empty(&logits, logits.shape(), logits.dtype()));
    let target = fresh.as_ref().map(|out| &out.handle);
    let (statistics, labels) = ((&lse.handle, &slope.handle), &labels.handle);
    let done = by_half!(logits, E => {
        kernels::logits_gradient::<E>(&logits.client, &logits.handle, statistics, labels, target, shape)
    });
    launched("cross-entropy gradient", done);
    fresh.unwrap_or(logits)
}
