//! Norms of query and key heads in a packed projection, in place.

use burn::backend::{Cube, DType, TensorMetadata};
use kernels_cubecl::pointwise::head_norms::{self, HeadsShape};

use super::{Float, are_half, empty, launched, norm::two_rows, packed, work};
use crate::head_norms::{HeadNormKernels, HeadNorms, forward_unfused, grads_unfused};

impl HeadNormKernels for Cube {
    fn norm_heads(qkv: Float, weights: [Float; 2], norms: HeadNorms) -> Float {
        let shape = shape(&qkv, norms);
        if !are_half([&qkv, &weights[0], &weights[1]]) || !shape.has_kernel() {
            return forward_unfused::<Self>(qkv, weights, norms);
        }
        let _noted = work::memory("norms of heads", &qkv, |bytes| 2 * bytes);
        let (x, [q, k], norm) = (packed(qkv), weights.map(packed), (norms.rms.eps as f32, norms.rms.plus_one));
        let y = empty(&x, x.shape(), x.dtype());
        let weights = [&q.handle, &k.handle];
        let done = by_half!(x, E => head_norms::forward::<E>(&x.client, &x.handle, weights, &y.handle, norm, shape));
        launched("norms of heads", done);
        y
    }

    fn norm_heads_grads(qkv: Float, weights: [Float; 2], grad: Float, norms: HeadNorms) -> [Float; 3] {
        let shape = shape(&qkv, norms);
        if !are_half([&qkv, &weights[0], &weights[1], &grad]) || !shape.has_kernel() {
            return grads_unfused::<Self>(qkv, weights, grad, norms);
        }
        let _noted = work::memory("gradients of norms of heads", &qkv, |bytes| 3 * bytes);
        let (x, [q, k], grad, norm) =
            (packed(qkv), weights.map(packed), packed(grad), (norms.rms.eps as f32, norms.rms.plus_one));
        let (dx, sums) = (empty(&x, x.shape(), x.dtype()), empty(&x, [2, shape.head_dim], DType::F32));
        let (weights, targets) = ([&q.handle, &k.handle], [&dx.handle, &sums.handle]);
        let done = by_half!(x, E => {
            head_norms::backward::<E>(&x.client, &x.handle, weights, &grad.handle, targets, norm, shape)
        });
        launched("gradients of norms of heads", done);
        let [q, k] = two_rows(sums);
        [dx, q, k]
    }
}

fn shape(qkv: &Float, norms: HeadNorms) -> HeadsShape {
    let shape = qkv.shape();
    HeadsShape {
        tokens: shape[0] * shape[1],
        heads: norms.heads.heads,
        kv_heads: norms.heads.kv_heads,
        all_heads: shape[2],
        head_dim: shape[3],
    }
}
