//! GEMMs with one matrix of two or four rows and columns.

use super::{Float, are_floats, columns, launched, packed, rows, work};
use burn::backend::{DType, TensorMetadata};
use burn::tensor::Shape;
use gpu::cuda::empty;
use kernels_cubecl::pointwise::small_matrix::{SmallMatrix, multiply};

/// `a [.., k] · b [1, .., k, n]` with elements of `dtype`, which is theirs or fp32, for `k` and `n` of 2 or 4: a kernel of its
/// own is faster there than a GEMM. `None` for other sizes and types.
///
/// # Panics
/// If they are on two devices.
pub fn times_small_matrix(a: &Float, b: &Float, dtype: DType) -> Option<Float> {
    let (sizes, strides) = (b.meta.shape(), b.meta.strides());
    let last = sizes.num_dims() - 1;
    let of = SmallMatrix { rows: columns(a), columns: columns(b), strides: [strides[last - 1], strides[last]] };
    let is_one = sizes[..last - 1].iter().all(|size| *size == 1) && sizes[last - 1] == of.rows;
    let is_here = are_floats([a, b]) && (dtype == a.dtype() || dtype == DType::F32);
    if !is_one || !is_here || !of.has_kernel(rows(a)) {
        return None;
    }
    a.assert_is_on_same_device(b);
    let (a, shape) = (packed(a.clone()), [&a.meta.shape()[..a.meta.shape().num_dims() - 1], &[of.columns]].concat());
    let out = empty(&a, Shape::from(shape), dtype);
    let _noted = work::memory("times a small matrix", &out, |bytes| bytes + rows(&a) * of.rows * a.dtype().size());
    let (client, rows) = (&a.client, rows(&a));
    let done = if dtype == a.dtype() {
        by_float!(a, E => multiply::<E, E>(client, &a.handle, &b.handle, &out.handle, rows, of))
    } else {
        by_float!(a, E => multiply::<E, f32>(client, &a.handle, &b.handle, &out.handle, rows, of))
    };
    launched("times a small matrix", done);
    Some(out)
}
