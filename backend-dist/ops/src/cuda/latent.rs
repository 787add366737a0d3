//! Keys and values of multi-head latent attention. Values stay in the projection, next to their part of the keys.

use burn::backend::{Cube, TensorMetadata};
use burn_cubecl::kernel::copy_contiguous;
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::pointwise::latent::{self, LatentShape};

use super::{Float, are_half, empty, is_aligned, launched, packed, work};
use crate::latent::{LatentKernels, forward_unfused, grads_unfused};

impl LatentKernels for Cube {
    fn latent_keys(kv: Float, shared: Float, [cos, sin]: [Float; 2], own: usize) -> [Float; 2] {
        let (dims, rotated) = (kv.shape(), shared.shape()[2]);
        let [s, b, heads, both] = [dims[0], dims[1], dims[2], dims[3]];
        let shape = shape([s, b, heads], [rotated, own, both - own], &cos);
        if !are_half([&kv, &shared, &cos, &sin]) || !shape.has_kernel() {
            return forward_unfused::<Self>(kv, shared, [cos, sin], own);
        }
        let noted = work::memory("latent keys", &kv, |bytes| bytes / both * (2 * own + rotated));
        let [kv, shared, cos, sin] = [kv, shared, cos, sin].map(packed);
        let keys = empty(&kv, [s, b, heads, rotated + own], kv.dtype());
        let angles = (&cos.handle, &sin.handle);
        let done = by_half!(kv, E => {
            latent::keys::<E>(&kv.client, &kv.handle, &shared.handle, angles, &keys.handle, shape)
        });
        launched("latent keys", done);
        drop(noted);
        [keys, behind(kv, own)]
    }

    fn latent_keys_grads([keys, values]: [Float; 2], [cos, sin]: [Float; 2], own: usize) -> [Float; 2] {
        let (dims, value) = (keys.shape(), values.shape()[3]);
        let [s, b, heads, length] = [dims[0], dims[1], dims[2], dims[3]];
        let shape = shape([s, b, heads], [length - own, own, value], &cos);
        if !are_half([&keys, &values, &cos, &sin]) || !shape.has_kernel() {
            return grads_unfused::<Self>([keys, values], [cos, sin], own);
        }
        let _noted =
            work::memory("gradients of latent keys", &keys, |bytes| bytes / length * (length + own + 2 * value));
        let [keys, values, cos, sin] = [keys, values, cos, sin].map(packed);
        let kv = empty(&keys, [s, b, heads, own + value], keys.dtype());
        let shared = empty(&keys, [s, b, length - own], keys.dtype());
        let (angles, targets) = ((&cos.handle, &sin.handle), [&kv.handle, &shared.handle]);
        let done = by_half!(keys, E => {
            latent::gradients::<E>(&keys.client, [&keys.handle, &values.handle], angles, targets, shape)
        });
        launched("gradients of latent keys", done);
        [kv, shared]
    }
}

fn shape([s, b, heads]: [usize; 3], [rotated, own, value]: [usize; 3], cos: &Float) -> LatentShape {
    let tokens = s * b;
    LatentShape {
        tokens,
        batch: tokens / cos.shape()[0].max(1),
        heads,
        rope_dim: rotated,
        nope_dim: own,
        value_dim: value,
    }
}

/// The features of `x [s, b, heads, n]` from `first` on, in place if attention can read them there.
fn behind(mut x: CubeTensor, first: usize) -> CubeTensor {
    x.handle = x.handle.clone().offset_start((first * x.dtype.size()) as u64);
    x.meta.shape_mut()[3] -= first;
    if is_aligned(&x) { x } else { copy_contiguous(x) }
}
