//! Rows of an embedding matrix by id; this rank may hold a shard of the rows.

use burn::backend::{
    Backend, DType, FloatDType, Scalar, Shape, TensorMetadata,
    tensor::{FloatTensor as Float, IndexingUpdateOp, IntTensor},
};

use super::{dims, last, reshape, rows};

/// The ids as local row indices (clamped), and 1 where the id is local, else 0, `[ids, 1]` in type `dtype`.
fn held<B: Backend>(ids: IntTensor<B>, first_row: usize, n_rows: usize, dtype: DType) -> (IntTensor<B>, Float<B>) {
    let n: usize = dims(&ids).iter().product();
    let (from, to) = (Scalar::Int(0), Scalar::Int(n_rows as i64 - 1));
    let ids = B::int_sub_scalar(B::int_reshape(ids, Shape::new([n])), Scalar::Int(first_row as i64));
    let row = B::int_clamp(ids.clone(), from, to);
    // |id - clamped id| is 0 exactly when the row is held here.
    let distance = B::int_clamp(B::int_abs(B::int_sub(ids, row.clone())), Scalar::Int(0), Scalar::Int(1));
    let distance = reshape::<B>(B::int_into_float(distance, FloatDType::from(dtype)), [n, 1]);
    (row, B::float_add_scalar(B::float_neg(distance), Scalar::Float(1.0)))
}

pub fn forward<B: Backend>(w: Float<B>, ids: IntTensor<B>, first_row: usize) -> Float<B> {
    let mut shape = dims(&ids);
    shape.push(last(&w));
    let (row, mask) = held::<B>(ids, first_row, dims(&w)[0], w.dtype());
    reshape::<B>(B::float_mul(B::float_select(w, 0, row), mask), shape)
}

pub fn weight_grad<B: Backend>(grad: Float<B>, ids: IntTensor<B>, first_row: usize, n_rows: usize) -> Float<B> {
    let (hidden, dtype) = (last(&grad), grad.dtype());
    let (row, mask) = held::<B>(ids, first_row, n_rows, dtype);
    let table = B::float_zeros(Shape::new([n_rows, hidden]), &grad.device(), FloatDType::from(dtype));
    B::float_select_assign(table, 0, row, B::float_mul(rows::<B>(grad), mask), IndexingUpdateOp::Add)
}
