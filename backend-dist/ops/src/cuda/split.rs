//! Splitting and joining the features of a projection.

use burn::backend::{Cube, TensorMetadata, ops::FloatTensorOps};
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::pointwise::columns::{self, ColumnRange};

use super::{Float, are_half, columns as width, empty, launched, packed, rows, work};
use crate::split::{SplitKernels, slices};

impl SplitKernels for Cube {
    fn split(x: Float, sizes: &[usize]) -> Vec<Float> {
        if !are_half([&x]) || !places(&x, sizes).all(|of| of.has_kernel()) {
            return slices::<Self>(x, sizes);
        }
        let _noted = work::memory("split", &x, |bytes| 2 * bytes);
        let x = packed(x);
        let part = |of: ColumnRange| {
            let shape = x.shape();
            let part = empty(&x, [shape[0], shape[1], of.columns], x.dtype());
            let done = by_half!(x, E => columns::copy_out::<E>(&x.client, &x.handle, &part.handle, of));
            launched("split", done);
            part
        };
        places(&x, sizes).map(part).collect()
    }

    fn join(parts: Vec<Float>) -> Float {
        let sizes: Vec<usize> = parts.iter().map(width).collect();
        let (first, features) = (&parts[0], sizes.iter().sum());
        let like = [first.shape()[0], first.shape()[1], features];
        let half = parts.iter().all(|part| are_half([first, part]));
        let x = empty(first, like, first.dtype());
        if !half || !places(&x, &sizes).all(|of| of.has_kernel()) {
            return Self::float_cat(parts, 2);
        }
        let _noted = work::memory("join", &x, |bytes| 2 * bytes);
        for (part, of) in parts.into_iter().map(packed).zip(places(&x, &sizes)) {
            launched("join", by_half!(x, E => columns::copy_in::<E>(&x.client, &part.handle, &x.handle, of)));
        }
        x
    }
}

/// The column ranges of the chunks of `x`.
fn places(x: &CubeTensor, sizes: &[usize]) -> impl Iterator<Item = ColumnRange> {
    let (rows, width) = (rows(x), width(x));
    sizes.iter().scan(0, move |end, &columns| {
        let first = *end;
        *end += columns;
        Some(ColumnRange { rows, width, first, columns })
    })
}
