//! FP8 with a scale for each group of rows: one launch for the amax of all groups, one for their casts, and one for their
//! GEMMs, or a cuBLASLt GEMM for each group. Scales stay on the GPU.

use std::sync::Arc;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{Cube, DType, FloatDType, TensorMetadata};
use burn::tensor::Shape;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::Client;
use kernels_cubecl::fp8::{Codec, blocks, groups};
use kernels_cubecl::grouped::fp8::{self as kernels, Fp8Call, Fp8Operand};
use kernels_cubecl::hopper::mma::Half;

use super::blocks::view;
use super::fp8::{format, half, sums, to_write};
use super::{Float, columns, empty, launched, work};
use crate::fp8::{
    Form, Fp8GroupKernels, Granularity, Groups, Matrix, Number, Precision, QuantizedGroups, RowsOf, Scaling, Sides,
};
use gpu::cuda::lt_fp8::{Onto, Operand, Sums, multiply_one};
use gpu::cuda::{clear, flush};
use gpu::profile::{self, Kind, Operation, operation};

/// Elements between the scales of two groups: cuBLASLt requires pointers of FP8 GEMMs to be multiples of 16 bytes.
const APART: usize = kernels::APART;

/// Whether there is a kernel for these groups with scales of their own; else each is a cuBLASLt GEMM.
fn has_kernel(call: Fp8Call, sides: [usize; 2], client: &Client) -> bool {
    call.check(client, sides, kernels::Scaling::Groups).is_ok()
}

fn kernel_scaling(x: &Groups<Cube>) -> kernels::Scaling {
    match x.granularity {
        Granularity::Tensor => kernels::Scaling::Groups,
        Granularity::Vector | Granularity::Block => kernels::Scaling::Blocks,
    }
}

fn kernel_operand(x: &Groups<Cube>) -> Fp8Operand<'_> {
    Fp8Operand { bytes: &x.data.handle, scales: &x.inverse.handle, format: format(x.number) }
}

/// The matrix of a group in place, and its scale.
struct GroupMatrix {
    bytes: CubeTensor,
    inverse: CubeTensor,
    rows: usize,
    inner: usize,
}

impl GroupMatrix {
    fn of(x: &Groups<Cube>, group: usize) -> Self {
        let ([rows, inner], range) = x.matrix(group);
        let bytes = view(&x.data, [1, rows, inner], [rows * inner, inner, 1], range.start);
        Self { bytes, inverse: view(&x.inverse, [1, 1, 1], [1, 1, 1], group * APART), rows, inner }
    }

    fn operand(&self, number: Number) -> Operand<'_> {
        let Self { bytes, inverse, rows, inner } = self;
        let granularity = Granularity::Tensor;
        Operand { bytes, inverse, granularity, format: format(number), rows: *rows, inner: *inner }
    }
}

/// A block of `[rows, columns]` elements from element `start` on.
fn at(out: &CubeTensor, start: usize, [rows, columns]: [usize; 2]) -> CubeTensor {
    view(out, [1, rows, columns], [rows * columns, columns, 1], start)
}

/// Gradients of all weights, one after the other in `out`.
fn weight_grads(grad: &Groups<Cube>, x: &Groups<Cube>, matrices: usize, out: &CubeTensor, onto: Onto) {
    let (each, sides) = (x.counts.len() / matrices, [grad.columns, x.columns]);
    let _noted = noted("weight gradient", grad, x, matrices, (out.dtype.size(), onto == Onto::Add));
    if x.form == Form::TransposeOfAll {
        let (call, operands) = (Fp8Call { counts: &x.counts, matrices }, [grad, x].map(kernel_operand));
        let target = (&out.handle, onto == Onto::Add);
        let done = call.weight_gradient(&out.client, operands, target, sides, kernel_scaling(x));
        return launched("grouped FP8 GEMM, weight gradients", done);
    }
    for matrix in 0..matrices {
        let target = at(out, matrix * sides[0] * sides[1], sides);
        let mut onto = onto;
        for group in (matrix * each..(matrix + 1) * each).filter(|group| x.counts[*group] > 0) {
            let (left, right) = (GroupMatrix::of(grad, group), GroupMatrix::of(x, group));
            multiply_one(left.operand(grad.number), right.operand(x.number), &target, onto, Sums::Exact);
            onto = Onto::Add;
        }
        if onto == Onto::Replace {
            clear(&target);
        }
    }
}

/// Casts groups with scales of their blocks, which no two groups share.
fn cast_blocks(
    x: Float,
    granularity: Granularity,
    number: Number,
    counts: &Arc<[usize]>,
    (sides, rows_of): (Sides, RowsOf),
) -> QuantizedGroups<Cube> {
    let (columns, x) = (columns(&x), half(x));
    let all = counts.iter().sum();
    let (matrices, rows, transposed) = match rows_of {
        RowsOf::Weights => (counts.len(), counts[0], Form::Transpose),
        RowsOf::Tokens => (1, all, Form::TransposeOfAll),
    };
    let form = |wanted: bool, [rows, inner]: [usize; 2]| {
        let [lines, line] = granularity.scales(rows, inner);
        let inverse = || empty(&x, [matrices * lines * line], DType::F32);
        let data = || empty(&x, [all * columns], DType::U8);
        wanted.then(|| Matrix { data: data(), rows, inner, inverse: inverse(), granularity, number })
    };
    let (by_rows, by_columns) = (form(sides.by_rows, [rows, columns]), form(sides.by_columns, [columns, rows]));
    let targets = [&by_rows, &by_columns].map(to_write);
    let (how, sizes) = ((granularity, format(number), Codec::Instruction), [matrices, rows, columns]);
    launched("cast of groups to FP8", by_half!(x, E => blocks::cast::<E>(&x.client, &x.handle, targets, how, sizes)));
    let groups = |form| {
        let counts = counts.clone();
        move |Matrix { data, inverse, .. }: Matrix<Cube>| Groups {
            data,
            counts,
            columns,
            form,
            inverse,
            granularity,
            number,
        }
    };
    QuantizedGroups { by_rows: by_rows.map(groups(Form::Rows)), by_columns: by_columns.map(groups(transposed)) }
}

impl Fp8GroupKernels for Cube {
    fn fp8_groups_amax(x: Float, counts: &[usize]) -> Float {
        let _noted = work::memory("FP8 amax of groups", &x, |bytes| bytes);
        let x = half(x);
        let (found, columns) = (empty(&x, [counts.len()], DType::F32), columns(&x));
        let done = by_half!(x, E => groups::amax::<E>(&x.client, &x.handle, &found.handle, counts, columns));
        launched("FP8 amax of groups", done);
        found
    }

    fn fp8_groups_cast(
        x: Float,
        scaling: &Scaling<Self>,
        number: Number,
        counts: &Arc<[usize]>,
        (sides, rows): (Sides, RowsOf),
    ) -> QuantizedGroups<Self> {
        let written = usize::from(sides.by_rows) + usize::from(sides.by_columns);
        let _noted = work::memory("cast of groups to FP8", &x, |bytes| bytes + bytes / x.dtype.size() * written);
        let x = half(x);
        let Scaling::Tensor(scales) = scaling else {
            return cast_blocks(x, scaling.granularity(), number, counts, (sides, rows));
        };
        let (columns, elements) = (columns(&x), x.meta.shape().num_elements());
        let scale = super::packed(scales.scale.clone());
        let column = Self::float_reshape(scales.inverse.clone(), Shape::from([counts.len(), 1]));
        let inverse = super::packed(Self::float_expand(column, Shape::from([counts.len(), APART])));
        let bytes = |wanted: bool| wanted.then(|| empty(&x, [elements], DType::U8));
        let (by_rows, by_columns) = (bytes(sides.by_rows), bytes(sides.by_columns));
        // Both operands of a weight gradient have these counts, so both are stored the same way.
        let call = Fp8Call { counts, matrices: counts.len() };
        let together = rows == RowsOf::Tokens && has_kernel(call, [columns; 2], &x.client);
        let (format, codec) = (format(number), Codec::Instruction);
        let conversion = groups::GroupConversion { format, codec, counts, columns, together };
        let [lines, transposed] = [&by_rows, &by_columns].map(|x| x.as_ref().map(|x| &x.handle));
        let done =
            by_half!(x, E => groups::cast::<E>(&x.client, &x.handle, &scale.handle, lines, transposed, conversion));
        launched("cast of groups to FP8", done);
        let groups = |data, form| {
            let (counts, inverse) = (counts.clone(), inverse.clone());
            Groups { data, counts, columns, form, inverse, granularity: Granularity::Tensor, number }
        };
        let transposed = if together { Form::TransposeOfAll } else { Form::Transpose };
        QuantizedGroups {
            by_rows: by_rows.map(|data| groups(data, Form::Rows)),
            by_columns: by_columns.map(|data| groups(data, transposed)),
        }
    }

    fn fp8_groups_gemm(x: &Groups<Self>, w: &Groups<Self>, dtype: DType, precision: Precision) -> Float {
        let (rows, each) = (x.counts.iter().sum::<usize>(), x.counts.len() / w.counts.len());
        let features = w.matrix(0).0[0];
        let out = empty(&x.data, [rows, features], dtype);
        let what = if w.form == Form::Rows { "forward" } else { "input gradient" };
        let _noted = noted(what, x, w, w.counts.len(), (dtype.size(), false));
        let element = if dtype == DType::F16 { Half::F16 } else { Half::Bf16 };
        let (sides, in_blocks) = ([features, x.columns], x.granularity != Granularity::Tensor);
        let call = Fp8Call { counts: &x.counts, matrices: w.counts.len() };
        if in_blocks || dtype.size() == 2 && has_kernel(call, sides, &out.client) {
            // The host may just have read the counts: without this the device waits for more commands.
            flush(&x.data);
            let (operands, target) = ([x, w].map(kernel_operand), (&out.handle, element));
            let sums = if precision == Precision::Fast { kernels::Sums::Fast } else { kernels::Sums::Exact };
            let done = match in_blocks {
                true => call.multiply_blocks(&out.client, operands, target, sides),
                false => call.multiply(&out.client, operands, target, sides, sums),
            };
            launched("grouped FP8 GEMM", done);
            flush(&out);
            return out;
        }
        let mut start = 0;
        for (group, &count) in x.counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            let (left, right) = (GroupMatrix::of(x, group), GroupMatrix::of(w, group / each));
            let target = at(&out, start * features, [count, features]);
            multiply_one(left.operand(x.number), right.operand(w.number), &target, Onto::Replace, sums(precision));
            start += count;
        }
        out
    }

    fn fp8_groups_weight_grad(grad: &Groups<Self>, x: &Groups<Self>, matrices: usize, dtype: DType) -> Float {
        let out = empty(&x.data, [matrices * grad.columns, x.columns], DType::F32);
        weight_grads(grad, x, matrices, &out, Onto::Replace);
        Self::float_cast(out, FloatDType::from(dtype))
    }

    fn fp8_groups_accumulate(grad: &Groups<Self>, x: &Groups<Self>, matrices: usize, sum: &Float, add: bool) {
        let (elements, found) = (matrices * grad.columns * x.columns, sum.meta.shape().num_elements());
        assert!(
            found == elements && sum.dtype == DType::F32 && sum.is_contiguous(),
            "gradients of {matrices} experts with {elements} elements in all do not fit a main gradient of {found} {:?}",
            sum.dtype
        );
        weight_grads(grad, x, matrices, sum, if add { Onto::Add } else { Onto::Replace });
    }
}

/// For a profile: each operand and output once, with `size` bytes per output element; an output that is added to is
/// also read.
fn noted(
    what: &'static str,
    left: &Groups<Cube>,
    right: &Groups<Cube>,
    matrices: usize,
    (size, adds): (usize, bool),
) -> Option<profile::Open> {
    operation(&left.data, || {
        let [rows, matrix] = [left, right].map(|x| x.counts.iter().sum::<usize>());
        // In a weight gradient both operands have the tokens, else the right one has the rows of the weights.
        let by_rows = left.form == Form::Rows;
        let [inner, out] = if by_rows { [left.columns, right.matrix(0).0[0]] } else { [right.columns, left.columns] };
        let result = if by_rows { rows * out } else { matrices * inner * out };
        let read = rows * left.columns + matrix * right.columns;
        Operation {
            name: format!("{matrices} FP8 GEMMs [rows, {inner}] · [{inner}, {out}] {what}").into(),
            kind: Kind::Gemm,
            precision: profile::Precision::Fp8,
            flops: 2.0 * rows as f64 * (inner * out) as f64,
            bytes: (read + result * size * (1 + usize::from(adds))) as f64,
        }
    })
}
