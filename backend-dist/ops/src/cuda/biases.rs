//! Experts with biases and a clamped SwiGLU.

use burn::backend::{Cube, DType, TensorMetadata};
use kernels_cubecl::pointwise::column_sum::{GroupRows, group_sums, has_kernel as has_sums};
use kernels_cubecl::pointwise::gated::{Clamp, Gating};
use kernels_cubecl::pointwise::moe::biases;
use kernels_cubecl::pointwise::moe::weighted;

use super::row_biases::{Blocks, upload};
use super::{Float, are_half, columns, empty, grouped, launched, packed, rows, work, writable};
use crate::moe::{self, BiasKernels, ClampedSwiGlu, MoeKernels, TokenGroups};

impl BiasKernels for Cube {
    fn clamped_swiglu(x: Float, bias: Float, p: Float, counts: &[usize], act: ClampedSwiGlu) -> Float {
        let (count, half) = (rows(&x), columns(&x) / 2);
        if !suit([&x, &bias], &p) || !weighted::has_kernel(count, half) {
            return moe::clamped_swiglu::<Self>(x, bias, p, counts, act);
        }
        let _noted = work::memory("clamped swiglu", &x, |bytes| bytes + bytes / 2);
        let (x, bias, p) = (packed(x), packed(bias), packed(p));
        let (out, blocks) = (empty(&x, [count, half], x.dtype()), Blocks::new(&x, counts));
        let (tensors, bias) = ([&x.handle, &p.handle, &out.handle], blocks.with(&bias));
        let done = by_half!(x, E => weighted::forward::<E>(&x.client, tensors, Some(bias), count, half, gating(act)));
        launched("clamped swiglu", done);
        out
    }

    fn clamped_swiglu_grads([x, bias, p]: [Float; 3], grad: Float, counts: &[usize], act: ClampedSwiGlu) -> [Float; 3] {
        let (count, half) = (rows(&x), columns(&x) / 2);
        let has_kernel = weighted::has_kernel(count, half) && has_sums(count, 2 * half);
        if !suit([&x, &bias, &grad], &p) || !has_kernel {
            return moe::clamped_swiglu_grads::<Self>([x, bias, p], grad, counts, act);
        }
        let _noted = work::memory("clamped swiglu gradient", &x, |bytes| 3 * bytes + bytes / 2);
        let (x, bias, p, grad) = (packed(x), packed(bias), packed(p), packed(grad));
        let (dx, dp) = (empty(&x, [count, 2 * half], x.dtype()), empty(&x, [count], DType::F32));
        let blocks = Blocks::new(&x, counts);
        let (from, to) = ([&x.handle, &p.handle, &grad.handle], [&dx.handle, &dp.handle]);
        let groups = Some(blocks.with(&bias));
        let done = by_half!(x, E => weighted::backward::<E>(&x.client, from, to, groups, count, half, gating(act)));
        launched("clamped swiglu gradient", done);
        let sums = sums(&dx, None, counts);
        [dx, sums, dp]
    }

    fn biased_forward(x: Float, w: Float, [bias, p]: [Float; 2], groups: TokenGroups) -> Float {
        if !suit([&x, &bias], &p) {
            return moe::add_weighted_bias::<Self>(Self::grouped_forward(x, w, groups), bias, p, groups.counts);
        }
        let (bias, p) = (packed(bias), packed(p));
        grouped::forward(x, w, groups, Some([&bias, &p]), None)
    }

    fn weighted_bias_grads(grad: Float, bias: Float, p: Float, p_grad: Float, counts: &[usize]) -> [Float; 2] {
        let (count, width) = (rows(&grad), columns(&grad));
        let has_kernel = biases::has_kernel(count, width) && has_sums(count, width);
        if !suit([&grad, &bias], &p) || p_grad.dtype() != DType::F32 || !has_kernel {
            return moe::weighted_bias_grads::<Self>(grad, bias, p, p_grad, counts);
        }
        let _noted = work::memory("gradients of biases of experts", &grad, |bytes| 2 * bytes);
        let (grad, bias, p, p_grad) = (packed(grad), packed(bias), packed(p), writable(p_grad));
        let blocks = Blocks::new(&grad, counts);
        let groups = blocks.with(&bias);
        let done = by_half!(grad, E => {
            biases::add_products::<E>(&grad.client, &grad.handle, &p_grad.handle, groups, count, width)
        });
        launched("gradients of biases of experts", done);
        [sums(&grad, Some(&p), counts), p_grad]
    }
}

/// Whether the kernels take these tensors and these factors.
fn suit<const N: usize>(tensors: [&Float; N], p: &Float) -> bool {
    are_half(tensors) && p.dtype() == DType::F32
}

fn gating(ClampedSwiGlu { alpha, limit }: ClampedSwiGlu) -> Gating {
    Gating::Clamped(Clamp::new(alpha as f32, limit as f32))
}

/// The sums of the rows of each group, times factors if there are such: `[groups · columns]` of fp32.
fn sums(x: &Float, factors: Option<&Float>, counts: &[usize]) -> Float {
    let (groups, width) = (counts.len(), columns(x));
    let total = empty(x, [groups * width], DType::F32);
    let ends = counts.iter().scan(0, |end, count| {
        *end += count;
        Some(*end)
    });
    let starts = upload(x, std::iter::once(0).chain(ends));
    let (of, factors) = (GroupRows { starts: &starts, groups, rows: rows(x) }, factors.map(|factors| &factors.handle));
    let done = by_half!(x, E => group_sums::<E>(&x.client, &x.handle, factors, &total.handle, of, width));
    launched("sums of groups", done);
    total
}
