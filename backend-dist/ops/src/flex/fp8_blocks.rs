//! Emulated FP8 with a scale for each block: values on the grid are stored divided by their scales, powers of two, which
//! changes no digit.

use std::ops::Range;

use burn::backend::flex::FlexTensor;
use burn::backend::{DType, Flex, Shape, ops::FloatTensorOps};

use super::fp8_grid::{COST, Grid, amax};
use super::output::filled_rows;
use super::real::Real;
use super::{compute_type, dense};
use crate::fp8::{BLOCK, Granularity, Matrix, Number, Quantized, Sides};

/// The largest power of two that takes `amax` to no more than `most`, up to 2¹²⁶; 1 if there is no amax.
fn power<E: Grid>(amax: E, most: E) -> E {
    let (power, bound) = ((most / amax).power_of_two(), E::of(2f64.powi(126)));
    match amax.is_size() {
        true if power < bound => power,
        true => bound,
        false => E::ONE,
    }
}

/// `x [rows, columns]` in blocks of `height` rows, which divide them, and [`BLOCK`] columns.
fn on_grid<E: Grid>(x: &[E], [rows, columns]: [usize; 2], height: usize, number: Number) -> Vec<E> {
    let (fields, most, line) = (number.fields(), E::of(number.max()), height * columns);
    filled_rows([rows / height, line], COST * line, |_, span, out| {
        for (x, out) in x[span].chunks(line).zip(out.chunks_mut(line)) {
            for first in (0..columns).step_by(BLOCK) {
                let row = |row: usize| row * columns + first..row * columns + columns.min(first + BLOCK);
                let rows = || (0..height).map(row);
                let top = rows().map(|row| amax(&x[row])).fold(E::ZERO, |top, x| if x > top { x } else { top });
                let scale = power(top, most);
                let cast = |x: E| (x * scale).on_grid(fields, most) / scale;
                let write = |row: Range<usize>, out: &mut [E]| {
                    out[row.clone()].iter_mut().zip(&x[row]).for_each(|(out, &x)| *out = cast(x));
                };
                rows().for_each(|row| write(row, out));
            }
        }
    })
}

/// Quantises `x [.., columns]` with a scale for each square block, or for the vectors of each form that is written.
pub(super) fn cast(x: FlexTensor, square: bool, number: Number, sides: Sides) -> Quantized<Flex> {
    let inner = compute_type(x.dtype());
    let columns = *x.layout().shape().to_vec().last().expect("an operand has features");
    let rows = x.layout().num_elements() / columns.max(1);
    let x = Flex::float_reshape(dense(x, inner), Shape::new([rows, columns]));
    let of = |x: FlexTensor, [rows, columns]: [usize; 2], height: usize| {
        let x = dense(x, inner);
        by_real!(inner, E => {
            E::tensor(on_grid::<E>(E::slice(&x), [rows, columns], height, number), Shape::new([rows, columns]))
        })
    };
    let inverse = by_real!(inner, E => E::tensor(vec![E::ONE], Shape::new([1])));
    let granularity = Granularity::Tensor;
    let matrix = |data, rows, inner| Matrix { data, rows, inner, inverse: inverse.clone(), granularity, number };
    let height = if square { BLOCK } else { 1 };
    let by_rows = (sides.by_rows || square).then(|| of(x.clone(), [rows, columns], height));
    let by_columns = sides.by_columns.then(|| match (&by_rows, square) {
        (Some(by_rows), true) => Flex::float_transpose(by_rows.clone()),
        _ => of(Flex::float_transpose(x), [columns, rows], 1),
    });
    Quantized {
        by_rows: by_rows.filter(|_| sides.by_rows).map(|data| matrix(data, rows, columns)),
        by_columns: by_columns.map(|data| matrix(data, columns, rows)),
    }
}
