//! Rows of an embedding matrix by id.

use burn::backend::flex::FlexTensor;
use burn::backend::{Flex, IntDType, Shape, ops::IntTensorOps};

use super::{output::filled, real::Real};

/// The row of each id in a matrix of `rows` rows whose first row has id `first_row`; `None` for an id outside.
pub(super) fn row_numbers(ids: &FlexTensor, first_row: usize, rows: usize) -> Vec<Option<usize>> {
    let ids = Flex::int_cast(ids.clone(), IntDType::I64);
    let ids = if ids.is_contiguous() { ids } else { ids.to_contiguous() };
    let ids = ids.as_slice::<i64>().expect("ids were just made dense i64");
    let row = |&id: &i64| usize::try_from(id - first_row as i64).ok().filter(|&row| row < rows);
    ids.iter().map(row).collect()
}

pub(super) fn forward<E: Real>(w: &FlexTensor, ids: &FlexTensor, first_row: usize) -> FlexTensor {
    let (rows, hidden) = (w.layout().shape()[0], w.layout().shape()[1]);
    let numbers = row_numbers(ids, first_row, rows);
    let w = E::slice(w);
    let data = filled(numbers.len() * hidden, |out| {
        // SAFETY: the only slice.
        let out = unsafe { out.slice(0..numbers.len() * hidden) };
        for (i, row) in numbers.iter().enumerate() {
            let out = &mut out[i * hidden..(i + 1) * hidden];
            match row {
                Some(row) => out.copy_from_slice(&w[row * hidden..(row + 1) * hidden]),
                None => out.fill(E::ZERO),
            }
        }
    });
    let mut shape = ids.layout().shape().to_vec();
    shape.push(hidden);
    E::tensor(data, Shape::from(shape))
}

pub(super) fn weight_grad<E: Real>(grad: &FlexTensor, ids: &FlexTensor, first_row: usize, rows: usize) -> FlexTensor {
    let numbers = row_numbers(ids, first_row, rows);
    let hidden = *grad.layout().shape().to_vec().last().expect("an embedding has a hidden dimension");
    let grad = E::slice(grad);
    let mut table = vec![E::ZERO; rows * hidden];
    for (i, row) in numbers.iter().enumerate() {
        if let Some(row) = row {
            let total = &mut table[row * hidden..(row + 1) * hidden];
            for (total, &g) in total.iter_mut().zip(&grad[i * hidden..(i + 1) * hidden]) {
                *total += g;
            }
        }
    }
    E::tensor(table, Shape::new([rows, hidden]))
}
