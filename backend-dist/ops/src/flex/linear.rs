//! `x · wᵀ` and its gradients as GEMMs, split among threads by rows of the output.

use burn::backend::Shape;
use burn::backend::flex::FlexTensor;

use super::{
    gemm::{Matrix, Onto, gemm},
    output::filled,
    parallel::{for_parts, parts},
    real::Real,
};

/// A tensor as a matrix of its last dimension by all others, without a copy where strides allow.
struct Flat {
    tensor: FlexTensor,
    rows: usize,
    columns: usize,
    strides: (isize, isize),
}

impl Flat {
    fn new(tensor: FlexTensor) -> Self {
        match collapse(tensor.layout().shape(), tensor.layout().strides()) {
            Some((rows, columns, strides)) => Self { tensor, rows, columns, strides },
            None => Self::new(tensor.to_contiguous()),
        }
    }

    fn matrix<E: Real>(&self) -> Matrix<*const E> {
        let start = E::buffer(&self.tensor)[self.tensor.layout().start_offset()..].as_ptr();
        Matrix { start, row: self.strides.0, column: self.strides.1 }
    }
}

/// Rows, columns and their strides, if the leading dimensions are evenly spaced.
fn collapse(shape: &[usize], strides: &[isize]) -> Option<(usize, usize, (isize, isize))> {
    let last = shape.len() - 1;
    let mut row: Option<isize> = None;
    let mut rows = 1;
    for (&n, &stride) in shape[..last].iter().zip(&strides[..last]).rev() {
        if n == 1 {
            continue;
        }
        match row {
            None => row = Some(stride),
            Some(inner) if stride == inner * rows as isize => {}
            Some(_) => return None,
        }
        rows *= n;
    }
    Some((rows, shape[last], (row.unwrap_or(shape[last] as isize), strides[last])))
}

/// `out [m, n] = a [m, k] · b [k, n]`, split by rows of `out`.
fn matmul<E: Real>([m, n, k]: [usize; 3], a: Matrix<*const E>, b: Matrix<*const E>, shape: Shape) -> FlexTensor {
    // Raw pointers are not `Send`, addresses are.
    let (a_start, b_start) = (a.start as usize, b.start as usize);
    let (a_row, a_column) = (a.row, a.column);
    let (b_row, b_column) = (b.row, b.column);
    // About 60 multiply-adds per nanosecond on one core.
    let parts = parts(m, n * k * 16).min(m.div_ceil(MIN_ROWS)).max(1);
    let data = filled::<E>(m * n, |out| {
        for_parts(m, parts, |_, rows| {
            let a = (a_start as *const E).wrapping_offset(rows.start as isize * a_row);
            // SAFETY: the tensors behind a and b outlive this call, and each part writes its own rows.
            unsafe {
                gemm(
                    [rows.len(), n, k],
                    Matrix::rows(out.pointer(rows.start * n), n as isize),
                    Matrix { start: a, row: a_row, column: a_column },
                    Matrix { start: b_start as *const E, row: b_row, column: b_column },
                    E::ONE,
                    Onto::Overwrite,
                );
            }
        });
    });
    E::tensor(data, shape)
}

/// Fewer rows than this per part would repeat the packing of `b` for little work.
const MIN_ROWS: usize = 64;

/// The shape of `x` with another last dimension.
fn with_last(x: &FlexTensor, last: usize) -> Shape {
    let mut shape = x.layout().shape().to_vec();
    *shape.last_mut().expect("a linear operand has features") = last;
    Shape::from(shape)
}

pub(super) fn forward<E: Real>(x: FlexTensor, w: FlexTensor) -> FlexTensor {
    let (x, w) = (Flat::new(x), Flat::new(w));
    let shape = with_last(&x.tensor, w.rows);
    matmul::<E>([x.rows, w.rows, x.columns], x.matrix(), w.matrix().transposed(), shape)
}

pub(super) fn input_grad<E: Real>(grad: FlexTensor, w: FlexTensor) -> FlexTensor {
    let (grad, w) = (Flat::new(grad), Flat::new(w));
    let shape = with_last(&grad.tensor, w.columns);
    matmul::<E>([grad.rows, w.columns, grad.columns], grad.matrix(), w.matrix(), shape)
}

pub(super) fn weight_grad<E: Real>(grad: FlexTensor, x: FlexTensor) -> FlexTensor {
    let (grad, x) = (Flat::new(grad), Flat::new(x));
    let shape = Shape::new([grad.columns, x.columns]);
    matmul::<E>([grad.columns, x.columns, grad.rows], grad.matrix().transposed(), x.matrix(), shape)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leading_dimensions_collapse_where_evenly_spaced() {
        assert_eq!(collapse(&[2, 3, 4], &[12, 4, 1]), Some((6, 4, (4, 1))));
        assert_eq!(collapse(&[2, 3, 4], &[24, 8, 1]), Some((6, 4, (8, 1))), "narrowed last dimension");
        assert_eq!(collapse(&[3, 2, 4], &[4, 12, 1]), None, "transposed leading dimensions");
        assert_eq!(collapse(&[5, 4], &[1, 5]), Some((5, 4, (1, 5))), "transposed matrix");
        assert_eq!(collapse(&[1, 3, 4], &[99, 4, 1]), Some((3, 4, (4, 1))), "a dimension of one has no stride");
        assert_eq!(collapse(&[4], &[1]), Some((1, 4, (4, 1))));
    }
}
