//! Rotary position embedding.

use burn::backend::{Cube, TensorMetadata};
use kernels_cubecl::pointwise::rope::{self, RopeShape};

use super::{Float, are_half, columns, empty, launched, packed};
use crate::ops::{options::Rotation, plain};

pub fn apply(x: Float, cos: Float, sin: Float, heads: usize, rotation: Rotation) -> Float {
    let dims = x.shape();
    let (head_dim, rotated) = (dims[3], 2 * columns(&cos));
    let shape = RopeShape { rows: dims[0], batch: dims[1], heads, all_heads: dims[2], head_dim, rotated };
    if !are_half([&x, &cos, &sin]) || !shape.has_kernel() {
        return plain::rope::apply::<Cube>(x, cos, sin, heads, rotation);
    }
    let (x, cos, sin) = (packed(x), packed(cos), packed(sin));
    let out = empty(&x, dims, x.dtype());
    let (angles, back) = ((&cos.handle, &sin.handle), rotation == Rotation::Back);
    let done = by_half!(x, E => rope::apply::<E>(&x.client, &x.handle, angles, &out.handle, shape, back));
    launched("rope", done);
    out
}
