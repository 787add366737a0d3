//! GEMMs of short rows, which adapters add to wide tensors.

use burn::backend::{Cube, DType, TensorMetadata};
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::pointwise::low_rank::{self, LowRank};
use kernels_cubecl::pointwise::low_rank_swiglu::{self as kernels, Left};

use super::{Float, are_half, columns, empty, is_aligned, launched, packed, rows, work};
use crate::low_rank_swiglu::{LowRankKernels, grad_unfused, unfused};
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

/// Sizes of the halves of `base` and what is added, if there is a kernel for them.
fn sizes(base: &CubeTensor, low: &CubeTensor, b: &CubeTensor) -> Option<LowRank> {
    let sizes = LowRank { rows: rows(low), columns: columns(base) / 2, inner: columns(low), transposed: true };
    (are_half([base, low, b]) && has_kernel(sizes, low)).then_some(sizes)
}

impl LowRankKernels for Cube {
    fn low_rank_swiglu(base: Float, low: Float, b: Float, amax: bool) -> (Float, Option<Float>) {
        let Some(sizes) = sizes(&base, &low, &b) else { return unfused::<Self>(base, low, b, amax) };
        let _noted = work::memory("swiglu with adapters", &base, |bytes| bytes / 2 * 3);
        let [base, low, b] = [base, low, b].map(packed);
        let mut shape = base.shape();
        *shape.last_mut().expect("swiglu has a last dimension") = sizes.columns;
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
            are_half([&base, low, a]) && has_kernel(LowRank { inner: columns(low), transposed: false, ..sizes }, low)
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
