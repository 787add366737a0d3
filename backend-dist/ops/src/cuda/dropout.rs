//! Dropout. The row keys are computed on the host, two numbers each; the GPU draws the mask.

use burn::backend::{Cube, TensorMetadata};
use kernels_cubecl::pointwise::dropout::{self as kernels, Drop};

use super::{Float, are_half, columns, empty, launched, packed, rows};
use crate::{
    dropout_mask::{DropoutMask, threshold},
    plain,
};

pub fn apply(x: Float, p: f64, key: &DropoutMask) -> Float {
    if !are_half([&x]) || !kernels::has_kernel(rows(&x), columns(&x)) {
        return plain::dropout::apply::<Cube>(x, p, key);
    }
    let x = packed(x);
    let (keys, first_column) = key.rows(x.meta.shape());
    let words: Vec<u8> = keys.iter().flat_map(|key| key.words()).flat_map(u32::to_le_bytes).collect();
    let keys = x.client.create_from_slice(&words);
    let how = Drop { first_column, limit: threshold(p), scale: (1.0 / (1.0 - p)) as f32 };
    let out = empty(&x, x.shape(), x.dtype());
    let shape = (rows(&x), columns(&x));
    let done = by_half!(x, E => kernels::apply::<E>(&x.client, &x.handle, &keys, &out.handle, shape, how));
    launched("dropout", done);
    out
}
