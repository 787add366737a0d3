//! Emulated FP8 with a scale for each group of rows.

use std::sync::Arc;

use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{DType, Flex, Shape};
use burn::tensor::Slice;

use super::fp8::{gemm, on_grid};
use super::fp8_grid::{Grid, amax};
use super::real::Real;
use super::{cast, compute_type, dense};
use crate::fp8::{
    Form, Fp8GroupKernels, Fp8Kernels, Granularity, Groups, Matrix, Number, Precision, Quantized, QuantizedGroups,
    RowsOf, Scales, Scaling, Sides,
};

/// The rows of each group of the contiguous `x`.
fn parts<'a, E: Grid>(x: &'a FlexTensor, counts: &'a [usize]) -> impl Iterator<Item = &'a [E]> {
    let columns = x.layout().num_elements() / counts.iter().sum::<usize>().max(1);
    let mut rest = E::slice(x);
    counts.iter().map(move |count| {
        let (part, behind) = rest.split_at(count * columns);
        rest = behind;
        part
    })
}

/// All groups of `x` on the grid, and their transposes.
fn quantised<E: Grid>(
    x: &FlexTensor,
    scale: &FlexTensor,
    number: Number,
    counts: &[usize],
    columns: usize,
    sides: Sides,
) -> [Option<FlexTensor>; 2] {
    let (mut by_rows, mut by_columns) = (Vec::new(), Vec::new());
    for (part, &scale) in parts::<E>(x, counts).zip(E::slice(scale)) {
        let found = on_grid(part, scale, number);
        if sides.by_columns {
            by_columns.extend((0..columns).flat_map(|column| found.iter().skip(column).step_by(columns).copied()));
        }
        by_rows.extend(found);
    }
    let flat = |data: Vec<E>| {
        let shape = Shape::new([data.len()]);
        E::tensor(data, shape)
    };
    [sides.by_rows.then(|| flat(by_rows)), sides.by_columns.then(|| flat(by_columns))]
}

/// All groups of `x` in blocks, and their transposes.
fn in_blocks(
    x: &FlexTensor,
    scaling: &Scaling<Flex>,
    number: Number,
    counts: &[usize],
    columns: usize,
    sides: Sides,
) -> [Option<FlexTensor>; 2] {
    let (mut first, mut all) = (0, [Vec::new(), Vec::new()]);
    let x = Flex::float_reshape(x.clone(), Shape::new([counts.iter().sum(), columns]));
    for &count in counts.iter().filter(|count| **count > 0) {
        let part = Flex::float_slice(x.clone(), &[Slice::from(first..first + count), Slice::from(..)]);
        let Quantized { by_rows, by_columns } = Flex::fp8_cast(part, scaling, number, sides);
        for (all, form) in all.iter_mut().zip([by_rows, by_columns]) {
            all.extend(
                form.map(|Matrix { data, rows, inner, .. }| Flex::float_reshape(data, Shape::new([rows * inner]))),
            );
        }
        first += count;
    }
    all.map(|parts| (!parts.is_empty()).then(|| Flex::float_cat(parts, 0)))
}

fn matrix<E: Grid>(x: &Groups<Flex>, group: usize) -> Matrix<Flex> {
    let ([rows, inner], range) = x.matrix(group);
    let data = E::tensor(E::slice(&x.data)[range].to_vec(), Shape::new([rows, inner]));
    let inverse = E::tensor(vec![E::slice(&x.inverse)[group]], Shape::new([1]));
    Matrix { data, rows, inner, inverse, granularity: Granularity::Tensor, number: x.number }
}

fn rows_gemm<E: Grid>(x: &Groups<Flex>, w: &Groups<Flex>) -> FlexTensor {
    let each = x.counts.len() / w.counts.len();
    let mut out = Vec::new();
    for group in (0..x.counts.len()).filter(|group| x.counts[*group] > 0) {
        out.extend_from_slice(E::slice(&gemm::<E>(matrix::<E>(x, group), matrix::<E>(w, group / each))));
    }
    let rows = x.counts.iter().sum::<usize>();
    let shape = Shape::new([rows, out.len() / rows]);
    E::tensor(out, shape)
}

fn weight_grad<E: Grid>(grad: &Groups<Flex>, x: &Groups<Flex>, matrices: usize) -> FlexTensor {
    let (each, size) = (x.counts.len() / matrices, grad.columns * x.columns);
    let mut out = vec![E::ZERO; matrices * size];
    for group in (0..x.counts.len()).filter(|group| x.counts[*group] > 0) {
        let part = gemm::<E>(matrix::<E>(grad, group), matrix::<E>(x, group));
        let sums = &mut out[group / each * size..][..size];
        sums.iter_mut().zip(E::slice(&part)).for_each(|(sum, &part)| *sum += part);
    }
    E::tensor(out, Shape::new([matrices * grad.columns, x.columns]))
}

impl Fp8GroupKernels for Flex {
    fn fp8_groups_amax(x: FlexTensor, counts: &[usize]) -> FlexTensor {
        let inner = compute_type(x.dtype());
        let x = dense(x, inner);
        by_real!(inner, E => E::tensor(parts::<E>(&x, counts).map(amax).collect(), Shape::new([counts.len()])))
    }

    fn fp8_groups_cast(
        x: FlexTensor,
        scaling: &Scaling<Self>,
        number: Number,
        counts: &Arc<[usize]>,
        (sides, _): (Sides, RowsOf),
    ) -> QuantizedGroups<Self> {
        let inner = compute_type(x.dtype());
        let x = dense(x, inner);
        let columns = x.layout().num_elements() / counts.iter().sum::<usize>();
        let ([by_rows, by_columns], inverse) = match scaling {
            Scaling::Tensor(Scales { scale, inverse }) => {
                (by_real!(inner, E => quantised::<E>(&x, scale, number, counts, columns, sides)), inverse.clone())
            }
            // Values on the grid are divided by their scales.
            _ => by_real!(inner, E => {
                let ones = E::tensor(vec![E::ONE; counts.len()], Shape::new([counts.len()]));
                (in_blocks(&x, scaling, number, counts, columns, sides), ones)
            }),
        };
        let granularity = Granularity::Tensor;
        let groups = |data, form| {
            let (counts, inverse) = (counts.clone(), inverse.clone());
            Groups { data, counts, columns, form, inverse, granularity, number }
        };
        QuantizedGroups {
            by_rows: by_rows.map(|data| groups(data, Form::Rows)),
            by_columns: by_columns.map(|data| groups(data, Form::Transpose)),
        }
    }

    fn fp8_groups_gemm(x: &Groups<Self>, w: &Groups<Self>, dtype: DType, _: Precision) -> FlexTensor {
        cast(by_real!(x.data.dtype(), E => rows_gemm::<E>(x, w)), dtype)
    }

    fn fp8_groups_weight_grad(grad: &Groups<Self>, x: &Groups<Self>, matrices: usize, dtype: DType) -> FlexTensor {
        cast(by_real!(x.data.dtype(), E => weight_grad::<E>(grad, x, matrices)), dtype)
    }

    fn fp8_groups_accumulate(_: &Groups<Self>, _: &Groups<Self>, _: usize, sum: &FlexTensor, _: bool) {
        panic!("main gradients are not summed up in place on the CPU: {:?}", sum.layout().shape())
    }
}
