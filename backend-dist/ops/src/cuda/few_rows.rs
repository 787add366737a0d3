//! Linear layers of a few rows, whose time is that of reading the weights.

use burn::backend::{DType, TensorMetadata};
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::decode::few_rows::{gated_linear, linear};
use kernels_cubecl::decode::{FewRows, Rows};

use super::{Float, Int, are_half, columns, empty, is_aligned, launched, packed, rows, with_last, work};

/// `x · wᵀ`, if there is a kernel for it.
pub fn dense(x: &CubeTensor, w: &CubeTensor) -> Option<Float> {
    let sizes = FewRows { rows: rows(x), groups: 1, features: rows(w), inner: columns(w) };
    if !is_dense(x, w) || !sizes.has_kernel() {
        return None;
    }
    let out = empty(x, with_last(x, sizes.features), x.dtype);
    run([&packed(x.clone()), w, &out], sizes, None);
    Some(out)
}

/// SwiGLU of `x · wᵀ`, if there is a kernel for it.
pub fn gated(x: &CubeTensor, w: &CubeTensor) -> Option<Float> {
    let sizes = FewRows { rows: rows(x), groups: 1, features: rows(w), inner: columns(w) };
    if !is_dense(x, w) || !sizes.has_kernel() {
        return None;
    }
    let x = packed(x.clone());
    let out = empty(&x, with_last(&x, sizes.features / 2), x.dtype);
    let _noted = work::memory("linear layer of few rows", w, |bytes| bytes);
    let handles = [&x.handle, &w.handle, &out.handle];
    let done = by_half!(x, E => gated_linear::<E>(&out.client, sizes, handles));
    launched("gated linear layer of few rows", done);
    Some(out)
}

/// Whether both are of one half precision type, and the weight is where vectors can be read.
fn is_dense(x: &CubeTensor, w: &CubeTensor) -> bool {
    are_half([x, w]) && w.is_contiguous() && is_aligned(w)
}

/// Of each slot the row that it names times its matrix, `[slots, features]`.
pub fn of_slots(x: Float, w: Float, slots: Int, groups: usize, of: Rows) -> Float {
    assert!(
        w.is_contiguous() && is_aligned(&w) && slots.is_contiguous() && w.dtype == x.dtype,
        "experts {:?} {:?}",
        w.meta.shape(),
        w.dtype
    );
    let count = slots.meta.shape().num_elements();
    let sizes = FewRows { rows: count, groups, features: rows(&w) / groups, inner: columns(&w) };
    let out = empty(&x, [count, sizes.features], x.dtype);
    run([&packed(x), &w, &out], sizes, Some((&slots, of)));
    out
}

fn run(tensors: [&CubeTensor; 3], sizes: FewRows, slots: Option<(&CubeTensor, Rows)>) {
    let [x, w, out] = tensors;
    // Of experts without a row nothing is read.
    let read = |bytes: usize| bytes / sizes.groups * sizes.groups.min(sizes.rows);
    let _noted = work::memory("linear layer of few rows", w, read);
    let (handles, slots) = (tensors.map(|x| &x.handle), slots.map(|(slots, of)| (&slots.handle, of)));
    let done = match x.dtype() {
        DType::F32 => linear::<f32>(&w.client, sizes, handles, slots),
        _ => by_half!(x, E => linear::<E>(&out.client, sizes, handles, slots)),
    };
    launched("linear layer of few rows", done);
}
