//! MoE: gathering rows by index, the router, and grouped GEMMs.

use std::ops::Range;

use burn::backend::{Cube, DType, TensorMetadata, ops::FloatTensorOps};
use burn::tensor::{Shape, Tensor};
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::pointwise::gated::Gating;
use kernels_cubecl::pointwise::moe::{self as kernels, SumRowsShape, weighted};
use kernels_cubecl::pointwise::split_bf16;

use super::{Float, Int, are_half, columns, empty, grouped, ids, is_here, launched, packed, reductions, rows, work};
use crate::moe::{self, MoeKernels, TokenGroups};
use gpu::cuda::dense;
use gpu::cuda::lt::{Operand, gemm};

impl MoeKernels for Cube {
    fn table(table: &Tensor<2, burn::tensor::Int>) -> Int {
        table.clone().try_into_primitive::<Self>().expect("a table on the GPU")
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
        let shape = SumRowsShape { rows: rows(&x), columns: columns(&x), out: table[0], terms: table[1] };
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
        if !are_half([&x]) || p.dtype != DType::F32 || !weighted::has_kernel(count, half) {
            return moe::weighted_swiglu::<Cube>(x, p);
        }
        let (x, p) = (packed(x), packed(p));
        let out = empty(&x, [count, half], x.dtype);
        let tensors = [&x.handle, &p.handle, &out.handle];
        let done = by_half!(x, E => weighted::forward::<E>(&x.client, tensors, None, count, half, Gating::Silu));
        launched("weighted swiglu", done);
        out
    }

    fn weighted_swiglu_grads(x: Float, p: Float, grad: Float) -> [Float; 2] {
        let _noted = work::memory("weighted swiglu gradient", &x, |bytes| 2 * bytes + bytes / 2);
        let (count, half) = (rows(&x), columns(&x) / 2);
        if !are_half([&x, &grad]) || p.dtype != DType::F32 || !weighted::has_kernel(count, half) {
            return moe::weighted_swiglu_grads::<Cube>(x, p, grad);
        }
        let (x, p, grad) = (packed(x), packed(p), packed(grad));
        let (dx, dp) = (empty(&x, [count, 2 * half], x.dtype), empty(&x, [count], DType::F32));
        let (inputs, outputs) = ([&x.handle, &p.handle, &grad.handle], [&dx.handle, &dp.handle]);
        let done =
            by_half!(x, E => weighted::backward::<E>(&x.client, inputs, outputs, None, count, half, Gating::Silu));
        launched("weighted swiglu gradient", done);
        [dx, dp]
    }

    /// The product of two half-precision numbers is exact in f32, so no operand is cast before.
    fn router_logits(x: Float, w: Float) -> Float {
        let (shape, wide) = ([rows(&x), rows(&w)], if x.dtype == DType::F64 { DType::F64 } else { DType::F32 });
        gemm(Operand::flat(x), Operand::flat(w).transposed(), shape.into(), wide)
    }

    /// GEMMs of f32 gradients use tensor cores too: an f32 number is the sum of three bf16 numbers. The three are
    /// concatenated along the columns for the gradient of `x`, and along the rows for that of `w`.
    fn router_logits_grads(x: Float, w: Float, grad: Float, [of_x, of_w]: [bool; 2]) -> [Option<Float>; 2] {
        let (tokens, experts, hidden) = (rows(&x), rows(&w), columns(&x));
        let narrow = [&x, &w].iter().all(|x| x.dtype == DType::BF16) && grad.dtype == DType::F32;
        if !narrow || !is_here(&grad) || !split_bf16::has_kernel(tokens, experts) {
            return moe::router_logits_grads::<Self>(x, w, grad, [of_x, of_w]);
        }
        let (grad, split) = (packed(grad), empty(&x, [tokens, 3 * experts], DType::BF16));
        launched("thirds", split_bf16::split(&grad.client, &grad.handle, &split.handle, tokens, experts));
        let of_x = of_x.then(|| {
            let w =
                Self::float_expand(Self::float_reshape(w, [1, experts, hidden].into()), [3, experts, hidden].into());
            let w = Self::float_reshape(packed(w), [3 * experts, hidden].into());
            gemm(Operand::flat(split.clone()), Operand::flat(w), [tokens, hidden].into(), DType::BF16)
        });
        let of_w = of_w.then(|| {
            let shape = [3 * experts, hidden].into();
            let thirds = gemm(Operand::flat(split).transposed(), Operand::flat(x), shape, DType::F32);
            let total = reductions::sum_dim(Self::float_reshape(thirds, [3, experts * hidden].into()), 0);
            Self::float_reshape(total, [experts, hidden].into())
        });
        [of_x, of_w]
    }

    fn grouped_forward(x: Float, w: Float, groups: TokenGroups) -> Float {
        grouped::forward(x, w, groups, None, None)
    }

    fn grouped_input_grad(grad: Float, w: Float, groups: TokenGroups) -> Float {
        grouped::input_grad(grad, w, groups, None)
    }

    fn grouped_weight_grad(grad: Float, x: Float, groups: TokenGroups) -> Float {
        grouped::weight_grad(grad, x, groups, None)
    }

    fn grouped_accumulate_weight_grad(grad: Float, x: Float, groups: TokenGroups, sum: &Float, add: bool) {
        grouped::accumulate_weight_grad(grad, x, groups, sum, add, None);
    }
}
