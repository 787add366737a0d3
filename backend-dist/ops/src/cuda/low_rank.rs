//! GEMMs of short rows, which adapters add to wide tensors.

use burn::backend::{Cube, DType, TensorMetadata};
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::pointwise::low_rank::{self, LowRank};
use kernels_cubecl::pointwise::low_rank_gradients::{self, ForFp8 as To, LowRankGradients, OfWeight};
use kernels_cubecl::pointwise::low_rank_swiglu::{self as kernels, GateAndUp, Left};

use super::fp8::format;
use super::{Float, are_half, columns, empty, is_aligned, launched, packed, rows, work};
use crate::fp8::{Granularity, Matrix, Scales};
use crate::low_rank::{ForFp8, LowRankGrads, LowRankKernels, MadeForFp8, grad_unfused, grads_unfused, unfused};
use crate::shared_input::{LeftGemm, with_added};

/// Adds `x · w`, or `x · wᵀ` if `w` is `transposed`, to `y` in f32 before rounding, as cuBLASLt does, if there is a kernel
/// for it.
pub fn add(y: &CubeTensor, x: &CubeTensor, w: &CubeTensor, transposed: bool) -> bool {
    let sizes = LowRank { rows: rows(x), columns: columns(y), inner: columns(x), transposed };
    let fits = are_half([y, x, w]) && [y, x, w].iter().all(|x| x.is_contiguous() && is_aligned(x));
    if !fits || !has_kernel(sizes, x) {
        return false;
    }
    let _noted = work::memory("low-rank GEMM added", y, |bytes| 2 * bytes);
    let done = by_half!(x, E => low_rank::add::<E>(&x.client, sizes, [&x.handle, &w.handle, &y.handle]));
    launched("low-rank GEMM added", done);
    true
}

fn has_kernel(sizes: LowRank, x: &CubeTensor) -> bool {
    by_half!(x, E => sizes.has_kernel::<E>(&x.client))
}

/// Sizes of `base` and what is added, if there is a kernel for them.
fn sizes(base: &CubeTensor, low: &CubeTensor, b: &CubeTensor) -> Option<GateAndUp> {
    let (half, inner) = (columns(base) / 2, columns(b));
    let sizes = GateAndUp { rows: rows(low), half, inner, apart: columns(low) != inner };
    (are_half([base, low, b]) && by_half!(base, E => sizes.has_kernel::<E>(&base.client))).then_some(sizes)
}

impl LowRankKernels for Cube {
    fn low_rank_grads(
        grad: Float,
        low: Float,
        b: Float,
        sum: Option<(Float, bool)>,
        for_fp8: ForFp8<Self>,
    ) -> LowRankGrads<Self> {
        let (inner, width) = (columns(&b), columns(&low));
        let sizes = LowRankGradients { rows: rows(&grad), columns: columns(&grad), inner, blocks: width / inner };
        let adds = sum.as_ref().is_none_or(|(sum, _)| sum.dtype() == DType::F32 && is_aligned(sum));
        let has_kernel = are_half([&grad, &low, &b]) && by_half!(grad, E => sizes.has_kernel::<E>(&grad.client));
        if !adds || !has_kernel {
            return grads_unfused::<Self>(grad, low, b, sum, for_fp8);
        }
        let is_cast = matches!(for_fp8, ForFp8::Cast(..));
        let _noted = work::memory("gradients of adapters", &grad, |bytes| bytes + if is_cast { bytes / 2 } else { 0 });
        let [grad, low, b] = [grad, low, b].map(packed);
        let (of_low, of_b) =
            (empty(&low, low.shape(), low.dtype()), sum.is_none().then(|| empty(&b, b.shape(), b.dtype())));
        let weight = match (&sum, &of_b) {
            (Some((sum, add)), _) => OfWeight::Sum { sum: &sum.handle, add: *add },
            (None, of_b) => OfWeight::Rounded(&of_b.as_ref().expect("made where there is no sum").handle),
        };
        let made = match for_fp8 {
            ForFp8::Nothing => MadeForFp8::Nothing,
            ForFp8::Amax => MadeForFp8::Amax(empty(&grad, [1], DType::F32)),
            ForFp8::Cast(scales, number) => {
                let data = empty(&grad, [sizes.rows * sizes.columns], DType::U8);
                let (inverse, granularity) = (scales.inverse.clone(), Granularity::Tensor);
                let (rows, inner) = (sizes.rows, sizes.columns);
                MadeForFp8::Cast(scales, Matrix { data, rows, inner, inverse, granularity, number })
            }
        };
        let to = match &made {
            MadeForFp8::Nothing => To::Nothing,
            MadeForFp8::Amax(amax) => To::Amax(&amax.handle),
            MadeForFp8::Cast(Scales { scale, .. }, Matrix { data, number, .. }) => {
                To::Cast { scale: &scale.handle, to: &data.handle, format: format(*number) }
            }
        };
        let handles = [&grad, &low, &b, &of_low].map(|x| &x.handle);
        let done = by_half!(grad, E => low_rank_gradients::gradients::<E>(&grad.client, sizes, handles, weight, to));
        launched("gradients of adapters", done);
        (of_low, of_b, made)
    }

    fn low_rank_swiglu(base: Float, low: Float, b: Float, amax: bool) -> (Float, Option<Float>) {
        let Some(sizes) = sizes(&base, &low, &b) else { return unfused::<Self>(base, low, b, amax) };
        let _noted = work::memory("swiglu with adapters", &base, |bytes| bytes / 2 * 3);
        let [base, low, b] = [base, low, b].map(packed);
        let mut shape = base.shape();
        *shape.last_mut().expect("swiglu has a last dimension") = sizes.half;
        let out = empty(&base, shape, base.dtype());
        let amax = amax.then(|| empty(&base, [1], DType::F32));
        let (handles, found) = ([&base, &low, &b, &out].map(|x| &x.handle), amax.as_ref().map(|x| &x.handle));
        let done = by_half!(base, E => kernels::forward::<E>(&base.client, sizes, handles, found));
        launched("swiglu with adapters", done);
        (out, amax)
    }

    fn low_rank_swiglu_grad(
        [base, low, b]: [Float; 3],
        grad: Float,
        left: Option<LeftGemm<Self>>,
        amax: bool,
    ) -> (Float, Option<Float>) {
        let fits = are_half([&base, &grad]);
        let Some(sizes) = sizes(&base, &low, &b).filter(|_| fits) else {
            return grad_unfused::<Self>([base, low, b], grad, left, amax);
        };
        let is_added = left.as_ref().is_some_and(|[low, a]| {
            let GateAndUp { rows, half, .. } = sizes;
            let of_left = LowRank { rows, columns: half, inner: columns(low), transposed: false };
            are_half([&base, low, a]) && has_kernel(of_left, low)
        });
        let (grad, left) = if is_added { (grad, left) } else { (with_added::<Self>(grad, left), None) };
        let left = left.map(|left| left.map(packed));
        let _noted = work::memory("swiglu gradient with adapters", &base, |bytes| bytes / 2 * 5);
        let [base, low, b, grad] = [base, low, b, grad].map(packed);
        let out = empty(&base, base.shape(), base.dtype());
        let amax = amax.then(|| empty(&base, [1], DType::F32));
        let (handles, found) = ([&base, &low, &b, &grad, &out].map(|x| &x.handle), amax.as_ref().map(|x| &x.handle));
        let left = left.as_ref().map(|[low, a]| Left { inner: columns(low), x: &low.handle, w: &a.handle });
        let done = by_half!(base, E => kernels::backward::<E>(&base.client, sizes, handles, left, found));
        launched("swiglu gradient with adapters", done);
        (out, amax)
    }
}
