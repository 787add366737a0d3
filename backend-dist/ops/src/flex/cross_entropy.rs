//! The local steps of the vocabulary-parallel cross-entropy, one token's logits at a time.

use burn::backend::{Shape, flex::FlexTensor};

use super::{
    embedding::row_numbers,
    lanes::{self, vectorized},
    output::{Output, filled_rows},
    parallel::{for_parts, parts},
    real::Real,
};

/// Rough cost of one element in picoseconds.
const COST: usize = 400;

vectorized! {
    fn max_rows<E>(logits: &[E], columns: usize, valid: usize, out: &mut [E]) {
        for (row, out) in logits.chunks_exact(columns).zip(out) {
            *out = lanes::max(&row[..valid]);
        }
    }
}

vectorized! {
    fn sum_rows<E>(logits: &[E], columns: usize, valid: usize, max: &[E], out: &mut [E]) {
        for ((row, &max), out) in logits.chunks_exact(columns).zip(max).zip(out) {
            *out = lanes::sum(&row[..valid], |x| (x - max).exp());
        }
    }
}

vectorized! {
    fn softmax_rows<E>(logits: &[E], columns: usize, valid: usize, lse: &[E], grad: &[E], out: &mut [E]) {
        let rows = logits.chunks_exact(columns).zip(out.chunks_exact_mut(columns));
        for ((row, out), (&lse, &grad)) in rows.zip(lse.iter().zip(grad)) {
            let (out, padding) = out.split_at_mut(valid);
            for (out, &x) in out.iter_mut().zip(row) {
                *out = (x - lse).exp() * grad;
            }
            padding.fill(E::ZERO);
        }
    }
}

/// Leading dimensions and columns of `logits`.
fn split(logits: &FlexTensor) -> (Vec<usize>, usize) {
    let mut shape = logits.layout().shape().to_vec();
    let columns = shape.pop().expect("logits have a vocabulary dimension");
    (shape, columns)
}

pub(super) fn maximum<E: Real>(logits: &FlexTensor, valid: usize) -> FlexTensor {
    let (shape, columns) = split(logits);
    let logits = E::slice(logits);
    let n = shape.iter().product();
    let data = filled_rows([n, 1], valid * COST, |rows, _, out| {
        max_rows(&logits[rows.start * columns..rows.end * columns], columns, valid, out);
    });
    E::tensor(data, Shape::from(shape))
}

pub(super) fn sums<E: Real>(
    logits: &FlexTensor,
    max: &FlexTensor,
    labels: &FlexTensor,
    first_row: usize,
    valid: usize,
) -> FlexTensor {
    let (mut shape, columns) = split(logits);
    let (logits, max) = (E::slice(logits), E::slice(max));
    let n = max.len();
    let mut data = vec![E::ZERO; 2 * n];
    let (total, predicted) = data.split_at_mut(n);
    let total = Output::of(total);
    for_parts(n, parts(n, valid * COST), |_, rows| {
        // SAFETY: each part has its own rows.
        let total = unsafe { total.slice(rows.clone()) };
        sum_rows(&logits[rows.start * columns..rows.end * columns], columns, valid, &max[rows], total);
    });
    for (i, column) in row_numbers(labels, first_row, valid).into_iter().enumerate() {
        if let Some(column) = column {
            predicted[i] = logits[i * columns + column] - max[i];
        }
    }
    shape.insert(0, 2);
    E::tensor(data, Shape::from(shape))
}

pub(super) fn logits_grad<E: Real>(
    logits: &FlexTensor,
    lse: &FlexTensor,
    labels: &FlexTensor,
    grad: &FlexTensor,
    first_row: usize,
    valid: usize,
) -> FlexTensor {
    let shape = logits.layout().shape().clone();
    let (_, columns) = split(logits);
    let labels = row_numbers(labels, first_row, valid);
    let (logits, lse, grad) = (E::slice(logits), E::slice(lse), E::slice(grad));
    let n = labels.len();
    let data = filled_rows([n, columns], columns * COST, |rows, span, out| {
        softmax_rows(&logits[span], columns, valid, &lse[rows.clone()], &grad[rows.clone()], out);
        for (out, i) in out.chunks_exact_mut(columns).zip(rows) {
            if let Some(column) = labels[i] {
                out[column] = out[column] - grad[i];
            }
        }
    });
    E::tensor(data, shape)
}
