//! Mixtures of experts: rows by number, and one cuBLASLt product for each group of rows where the groups lie.

use std::ops::Range;

use burn::backend::{Cube, DType, TensorMetadata};
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::pointwise::experts::{self as kernels, RowSums};

use super::blocks::view;
use super::{Float, Int, are_half, columns, empty, ids, is_here, launched, packed, rows, work};
use crate::cuda::lt::{Onto, Operand, multiply, product, varying};
use crate::cuda::{clear, dense};
use crate::ops::moe::{self, MoeKernels, groups};

impl MoeKernels for Cube {
    fn sum_rows(x: Float, index: Int) -> Float {
        let _noted = work::rows("rows of experts", &x, &index, 2 * x.dtype.size());
        let table = index.meta.shape();
        let shape = RowSums { rows: rows(&x), columns: columns(&x), out: table[0], terms: table[1] };
        let known = matches!(x.dtype, DType::BF16 | DType::F16 | DType::F32);
        if !known || !is_here(&x) || !kernels::has_sums(shape) {
            return moe::sum_rows::<Cube>(x, index);
        }
        let (x, index) = (packed(x), ids(index));
        let out = empty(&x, [shape.out, shape.columns], x.dtype);
        let (client, from, to) = (&x.client, &x.handle, &out.handle);
        let done = match x.dtype {
            DType::F32 => kernels::sum_rows::<f32>(client, from, &index.handle, to, shape),
            _ => by_half!(x, E => kernels::sum_rows::<E>(client, from, &index.handle, to, shape)),
        };
        launched("sums of rows", done);
        out
    }

    fn weighted_swiglu(x: Float, p: Float) -> Float {
        let _noted = work::memory("weighted swiglu", &x, |bytes| bytes + bytes / 2);
        let (count, half) = (rows(&x), columns(&x) / 2);
        if !are_half([&x]) || p.dtype != DType::F32 || !kernels::has_swiglu(count, half) {
            return moe::weighted_swiglu::<Cube>(x, p);
        }
        let (x, p) = (packed(x), packed(p));
        let out = empty(&x, [count, half], x.dtype);
        let done = by_half!(x, E => kernels::swiglu::<E>(&x.client, &x.handle, &p.handle, &out.handle, count, half));
        launched("weighted swiglu", done);
        out
    }

    fn weighted_swiglu_grads(x: Float, p: Float, grad: Float) -> [Float; 2] {
        let _noted = work::memory("weighted swiglu gradient", &x, |bytes| 2 * bytes + bytes / 2);
        let (count, half) = (rows(&x), columns(&x) / 2);
        if !are_half([&x, &grad]) || p.dtype != DType::F32 || !kernels::has_swiglu(count, half) {
            return moe::weighted_swiglu_grads::<Cube>(x, p, grad);
        }
        let (x, p, grad) = (packed(x), packed(p), packed(grad));
        let (dx, dp) = (empty(&x, [count, 2 * half], x.dtype), empty(&x, [count], DType::F32));
        let (inputs, outputs) = ([&x.handle, &p.handle, &grad.handle], [&dx.handle, &dp.handle]);
        let done = by_half!(x, E => kernels::swiglu_gradients::<E>(&x.client, inputs, outputs, count, half));
        launched("weighted swiglu gradient", done);
        [dx, dp]
    }

    /// Products of half precision numbers are exact in f32, so nothing is cast before.
    fn router_logits(x: Float, w: Float) -> Float {
        let (shape, wide) = ([rows(&x), rows(&w)], if x.dtype == DType::F64 { DType::F64 } else { DType::F32 });
        product(Operand::flat(x), Operand::flat(w).transposed(), shape.into(), wide)
    }

    fn grouped_forward(x: Float, w: Float, counts: &[usize]) -> Float {
        let (x, w) = (dense(x), dense(w));
        let features = rows(&w) / counts.len();
        let out = empty(&x, [rows(&x), features], x.dtype);
        varying(|| {
            for (group, range) in groups(counts) {
                let matrix = Operand::batched(part(&w, group * features..(group + 1) * features)).transposed();
                multiply(Operand::batched(part(&x, range.clone())), matrix, &part(&out, range), Onto::Replace);
            }
        });
        out
    }

    fn grouped_input_grad(grad: Float, w: Float, counts: &[usize]) -> Float {
        let (grad, w) = (dense(grad), dense(w));
        let features = rows(&w) / counts.len();
        let out = empty(&grad, [rows(&grad), columns(&w)], grad.dtype);
        varying(|| {
            for (group, range) in groups(counts) {
                let matrix = Operand::batched(part(&w, group * features..(group + 1) * features));
                multiply(Operand::batched(part(&grad, range.clone())), matrix, &part(&out, range), Onto::Replace);
            }
        });
        out
    }

    fn grouped_weight_grad(grad: Float, x: Float, counts: &[usize]) -> Float {
        let (grad, x) = (dense(grad), dense(x));
        let out = empty(&x, [counts.len() * columns(&grad), columns(&x)], x.dtype);
        add_weight_grads(&grad, &x, counts, &out, Onto::Replace);
        out
    }

    fn grouped_accumulate_weight_grad(grad: Float, x: Float, counts: &[usize], sum: &Float, add: bool) {
        let (grad, x) = (dense(grad), dense(x));
        let (elements, found) = (counts.len() * columns(&grad) * columns(&x), sum.meta.shape().num_elements());
        assert!(
            found == elements && sum.dtype == DType::F32 && sum.is_contiguous(),
            "gradients of {} experts with {elements} elements in all do not fit a main gradient of {found} {:?}",
            counts.len(),
            sum.dtype
        );
        add_weight_grads(&grad, &x, counts, sum, if add { Onto::Add } else { Onto::Replace });
    }
}

/// Rows of the matrix `x`, which has no gaps, where they lie.
fn part(x: &CubeTensor, range: Range<usize>) -> CubeTensor {
    let columns = columns(x);
    view(x, [1, range.len(), columns], [0, columns, 1], range.start * columns)
}

/// Gradients of all groups' matrices, below each other in `out`; zero for a group without rows.
fn add_weight_grads(grad: &CubeTensor, x: &CubeTensor, counts: &[usize], out: &CubeTensor, onto: Onto) {
    let (features, inner) = (columns(grad), columns(x));
    let matrix = |group: usize| view(out, [1, features, inner], [0, inner, 1], group * features * inner);
    varying(|| {
        for (group, range) in groups(counts) {
            let grad = Operand::batched(part(grad, range.clone())).transposed();
            multiply(grad, Operand::batched(part(x, range)), &matrix(group), onto);
        }
    });
    if onto == Onto::Replace {
        (0..counts.len()).filter(|group| counts[*group] == 0).for_each(|group| clear(&matrix(group)));
    }
}
