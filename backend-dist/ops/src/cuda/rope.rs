//! Rotary position embedding.

use burn::backend::{Cube, TensorMetadata};
use kernels_cubecl::pointwise::rope::{self, RopeShape};

use super::{Float, are_half, columns, empty, launched, packed, work};
use crate::{options::Rotation, plain};

/// Heads without another owner are rotated in place, so that unrotated features are not copied.
pub fn apply(x: Float, cos: Float, sin: Float, heads: usize, rotation: Rotation) -> Float {
    let dims = x.shape();
    let (head_dim, rotated) = (dims[3], 2 * columns(&cos));
    let shape = RopeShape { rows: dims[0], batch: dims[1], heads, all_heads: dims[2], head_dim, rotated };
    if !are_half([&x, &cos, &sin]) || !shape.has_kernel() {
        return plain::rope::apply::<Cube>(x, cos, sin, heads, rotation);
    }
    let (x, cos, sin) = (packed(x), packed(cos), packed(sin));
    let fresh = (!x.can_mut()).then(|| empty(&x, dims, x.dtype()));
    let _noted = work::memory("rope", &x, |bytes| match fresh {
        Some(_) => 2 * bytes,
        None => 2 * bytes / (shape.all_heads * head_dim) * (heads * rotated),
    });
    let (angles, back) = ((&cos.handle, &sin.handle), rotation == Rotation::Back);
    let out = fresh.as_ref().map(|out| &out.handle);
    let done = by_half!(x, E => rope::apply::<E>(&x.client, &x.handle, angles, out, shape, back));
    launched("rope", done);
    fresh.unwrap_or(x)
}
