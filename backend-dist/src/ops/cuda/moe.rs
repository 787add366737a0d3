//! Mixtures of experts: rows by number, the router, and products of groups of rows.

use std::ops::Range;

use burn::backend::{Cube, DType, TensorMetadata, ops::FloatTensorOps};
use burn::tensor::{Shape, Tensor};
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::grouped::in_waves;
use kernels_cubecl::pointwise::experts::{self as kernels, RowSums};
use kernels_cubecl::pointwise::thirds;

use super::{Float, Int, are_half, columns, empty, grouped, ids, is_here, launched, packed, rows, sums, work};
use crate::cuda::dense;
use crate::cuda::lt::{Operand, product};
use crate::ops::moe::{self, MoeKernels};

/// Times as many cubes as the device holds, for products beside exchanges.
const WAVES: u32 = 8;

impl MoeKernels for Cube {
    fn table(table: &Tensor<2, burn::tensor::Int>) -> Int {
        table.clone().try_into_primitive::<Self>().expect("a table beside the rows that it numbers")
    }

    /// An exchange takes some multiprocessors while the products run, and a cube that has a fixed share of the tiles
    /// would wait until one is free: with more cubes than fit, those that are left over go where there is room.
    fn sharing<T>(is_shared: bool, work: impl FnOnce() -> T) -> T {
        if is_shared { in_waves(WAVES, work) } else { work() }
    }

    fn rows_in_place(x: &Float, rows: Range<usize>, columns: usize) -> Float {
        let x = if x.is_contiguous() { x.clone() } else { dense(x.clone()) };
        let (row, held) = (columns * x.dtype.size(), x.handle.size_in_used() as usize);
        assert!(rows.end * row <= held, "rows {rows:?} of {columns} elements in {held} bytes of {:?}", x.dtype);
        let [before, behind] = [rows.start * row, held - rows.end * row];
        let handle = x.handle.offset_start(before as u64).offset_end(behind as u64);
        CubeTensor::new_contiguous(x.client, x.device, Shape::from([rows.len(), columns]), handle, x.dtype)
    }

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

    /// Products with gradients in fp32 take matrix units too: a number of fp32 is the sum of three of bf16, so that the
    /// three are beside each other in the product that gives the gradient of `x`, and below each other in that of `w`.
    fn router_logits_grads(x: Float, w: Float, grad: Float, [of_x, of_w]: [bool; 2]) -> [Option<Float>; 2] {
        let (tokens, experts, hidden) = (rows(&x), rows(&w), columns(&x));
        let narrow = [&x, &w].iter().all(|x| x.dtype == DType::BF16) && grad.dtype == DType::F32;
        if !narrow || !is_here(&grad) || !thirds::has_kernel(tokens, experts) {
            return moe::router_logits_grads::<Self>(x, w, grad, [of_x, of_w]);
        }
        let (grad, split) = (packed(grad), empty(&x, [tokens, 3 * experts], DType::BF16));
        launched("thirds", thirds::split(&grad.client, &grad.handle, &split.handle, tokens, experts));
        let of_x = of_x.then(|| {
            let w =
                Self::float_expand(Self::float_reshape(w, [1, experts, hidden].into()), [3, experts, hidden].into());
            let w = Self::float_reshape(packed(w), [3 * experts, hidden].into());
            product(Operand::flat(split.clone()), Operand::flat(w), [tokens, hidden].into(), DType::BF16)
        });
        let of_w = of_w.then(|| {
            let shape = [3 * experts, hidden].into();
            let thirds = product(Operand::flat(split).transposed(), Operand::flat(x), shape, DType::F32);
            let total = sums::sum_dim(Self::float_reshape(thirds, [3, experts * hidden].into()), 0);
            Self::float_reshape(total, [experts, hidden].into())
        });
        [of_x, of_w]
    }

    fn grouped_forward(x: Float, w: Float, counts: &[usize]) -> Float {
        grouped::forward(x, w, counts, None)
    }

    fn grouped_input_grad(grad: Float, w: Float, counts: &[usize]) -> Float {
        grouped::input_grad(grad, w, counts, None)
    }

    fn grouped_weight_grad(grad: Float, x: Float, counts: &[usize]) -> Float {
        grouped::weight_grad(grad, x, counts, None)
    }

    fn grouped_accumulate_weight_grad(grad: Float, x: Float, counts: &[usize], sum: &Float, add: bool) {
        grouped::accumulate_weight_grad(grad, x, counts, sum, add, None);
    }
}
