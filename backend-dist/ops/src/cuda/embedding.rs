//! Rows of an embedding matrix by id; this rank may hold a shard of the rows.

use burn::backend::{Cube, DType, FloatDType, Shape, TensorMetadata, ops::FloatTensorOps};
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::pointwise::embedding::{self as kernels, TableShape};

use super::accumulate::accumulate;
use super::{Float, Int, columns, empty, ids, is_aligned, is_here, launched, packed};
use crate::plain;
use gpu::cuda;

fn shape_of(x: &CubeTensor, rows: usize, tokens: &Int, first_row: usize) -> Option<TableShape> {
    let shape = TableShape { rows, hidden: columns(x), first_row, ids: tokens.meta.shape().num_elements() };
    (is_here(x) && shape.has_kernel(x.dtype().size())).then_some(shape)
}

pub fn forward(w: Float, tokens: Int, first_row: usize) -> Float {
    let Some(shape) = shape_of(&w, w.shape()[0], &tokens, first_row) else {
        return plain::embedding::forward::<Cube>(w, tokens, first_row);
    };
    let mut dims = tokens.shape().to_vec();
    dims.push(shape.hidden);
    let (w, tokens) = (packed(w), ids(tokens));
    let out = empty(&w, Shape::from(dims), w.dtype());
    let bytes = w.dtype().size();
    launched("embedding", kernels::forward(&w.client, &w.handle, &tokens.handle, &out.handle, shape, bytes));
    out
}

pub fn weight_grad(grad: Float, tokens: Int, first_row: usize, rows: usize) -> Float {
    let shape = shape_of(&grad, rows, &tokens, first_row).filter(|_| has_gradient(&grad));
    let Some(shape) = shape else {
        return plain::embedding::weight_grad::<Cube>(grad, tokens, first_row, rows);
    };
    // As one row, so that no padding is added.
    let (device, dtype) = (grad.device(), FloatDType::from(grad.dtype()));
    let table = Cube::float_zeros(Shape::new([rows * shape.hidden]), &device, dtype);
    run(grad, tokens, &table, shape, false);
    Cube::float_reshape(table, Shape::new([rows, shape.hidden]))
}

/// Every sum has a fixed order: that of its tokens, within segments of tokens.
pub fn accumulate_weight_grad(grad: Float, tokens: Int, [first_row, rows]: [usize; 2], sum: &Float, add: bool) {
    let shape = shape_of(&grad, rows, &tokens, first_row).filter(|_| has_gradient(&grad));
    let ready = sum.dtype() == DType::F32 && sum.is_contiguous() && is_aligned(sum);
    let fits = |shape: &TableShape| ready && sum.shape().num_elements() == rows * shape.hidden;
    let Some(shape) = shape.filter(fits) else {
        return accumulate(weight_grad(grad, tokens, first_row, rows), sum, add);
    };
    if !add {
        cuda::clear(sum);
    }
    run(grad, tokens, sum, shape, true);
}

fn has_gradient(grad: &CubeTensor) -> bool {
    matches!(grad.dtype(), DType::BF16 | DType::F16 | DType::F32)
}

fn run(grad: Float, tokens: Int, table: &CubeTensor, shape: TableShape, add: bool) {
    let (grad, tokens) = (packed(grad), ids(tokens));
    let (client, from, tokens, to) = (&grad.client, &grad.handle, &tokens.handle, &table.handle);
    let done = match (grad.dtype(), table.dtype() == DType::F32) {
        (DType::F32, _) => kernels::backward::<f32, f32>(client, from, tokens, to, shape, add),
        (_, true) => by_half!(grad, E => kernels::backward::<E, f32>(client, from, tokens, to, shape, add)),
        (_, false) => by_half!(grad, E => kernels::backward::<E, E>(client, from, tokens, to, shape, add)),
    };
    launched("embedding gradient", done);
}
