//! The choice of tokens on NVIDIA GPUs.

use burn::backend::{Cube, DType, TensorMetadata};
use kernels_cubecl::decode::draw::{OWN, changed, draw, likelihoods};
use kernels_cubecl::decode::likeliest;

use super::{Float, Int, columns, empty, launched, packed, rows, work};
use crate::draw::DrawOps;

impl DrawOps for Cube {
    fn op_likeliest(logits: Float) -> Int {
        let logits = packed(logits);
        let sizes = [rows(&logits), columns(&logits)];
        let _noted = work::memory("likeliest tokens", &logits, |bytes| bytes);
        let out = empty(&logits, [sizes[0]], DType::I32);
        launched(
            "likeliest tokens",
            by_float!(logits, E => likeliest::<E>(&logits.client, sizes, &logits.handle, &out.handle)),
        );
        out
    }

    fn op_draw(logits: Float, how: Float) -> Int {
        let (logits, how) = (packed(logits), packed(how));
        let sizes = [rows(&logits), columns(&logits)];
        let _noted = work::memory("drawn tokens", &logits, |bytes| bytes);
        let out = empty(&logits, [sizes[0]], DType::I32);
        let handles = [&logits.handle, &how.handle, &out.handle];
        launched("drawn tokens", by_float!(logits, E => draw::<E>(&logits.client, sizes, handles)));
        out
    }

    fn op_changed(logits: Float, places: Int, by: Float, kept: Int, bits: Int, counts: [usize; 2]) -> Float {
        let (logits, places, by, kept, bits) = (packed(logits), packed(places), packed(by), packed(kept), packed(bits));
        let sizes = [rows(&logits), columns(&logits)];
        let _noted = work::memory("changed logits", &logits, |bytes| 3 * bytes);
        let out = empty(&logits, sizes, DType::F32);
        let [changes, masks] = counts;
        let changes = [(&places.handle, &by.handle, changes), (&kept.handle, &bits.handle, masks)];
        let (client, from) = (&logits.client, &logits.handle);
        launched("changed logits", by_float!(logits, E => changed::<E>(client, sizes, from, changes, &out.handle)));
        out
    }

    fn op_likelihoods(logits: Float, drawn: Int, asked: Int, most: usize) -> Float {
        let (logits, drawn, asked) = (packed(logits), packed(drawn), packed(asked));
        let sizes = [rows(&logits), columns(&logits), most];
        let _noted = work::memory("likelihoods of tokens", &logits, |bytes| bytes);
        let out = empty(&logits, [sizes[0], OWN + 2 * most], DType::F32);
        let handles = [&logits.handle, &drawn.handle, &asked.handle, &out.handle];
        launched("likelihoods of tokens", by_float!(logits, E => likelihoods::<E>(&logits.client, sizes, handles)));
        out
    }
}
