//! Row sums for MoE.

use burn::backend::flex::FlexTensor;
use burn::backend::{DType, Flex, Shape};
use burn::tensor::{Int, Tensor};

use super::{cast, compute_type, dense, embedding::row_numbers, real::Real};
use crate::moe::MoeKernels;

impl MoeKernels for Flex {
    fn table(table: &Tensor<2, Int>) -> FlexTensor {
        table.clone().try_into_primitive::<Self>().expect("a table on the CPU")
    }

    fn sum_rows(x: FlexTensor, index: FlexTensor) -> FlexTensor {
        in_real!(x; E => sum_rows::<E>(&x, &index))
    }
}

fn sum_rows<E: Real>(x: &FlexTensor, index: &FlexTensor) -> FlexTensor {
    let (shape, table) = (x.layout().shape(), index.layout().shape());
    let (hidden, count, terms) = (shape[1], table[0], table[1]);
    let numbers = row_numbers(index, 0, shape[0]);
    let x = E::slice(x);
    let mut out = vec![E::ZERO; count * hidden];
    for (sum, rows) in out.chunks_exact_mut(hidden).zip(numbers.chunks_exact(terms)) {
        for &row in rows.iter().flatten() {
            for (sum, &value) in sum.iter_mut().zip(&x[row * hidden..(row + 1) * hidden]) {
                *sum += value;
            }
        }
    }
    E::tensor(out, Shape::new([count, hidden]))
}
