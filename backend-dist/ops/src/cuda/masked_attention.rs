//! FlashAttention with masks for single scores, whose bits the kernels read.

use burn::backend::{Cube, TensorMetadata};
use kernels_cubecl::attention::masks;

use super::attention::Call;
use super::{Float, are_half, packed, work};
use crate::attention_masks::{AttentionMasks, Bits, Kept};
use crate::masked_attention::MaskedAttentionKernels;
use crate::options::AttentionOptions;
use crate::plain::masked_attention as plain;

impl MaskedAttentionKernels for Cube {
    fn has_masked_attention(queries: &Float, keys: usize) -> bool {
        let has_kernel = !queries.client.features().matmul.wgmma.is_empty();
        // Draws come in fours.
        are_half([queries]) && has_kernel && matches!(queries.meta.shape()[3], 64 | 128) && keys.is_multiple_of(4)
    }

    fn masked_attention(qkv: [Float; 3], masks: &AttentionMasks<Self>, scale: f64) -> [Float; 2] {
        let Some(call) = call(&qkv, masks, scale) else { return plain::forward::<Self>(qkv, masks, scale) };
        let _noted = work::attention(&qkv[0], qkv[1].meta.shape()[0], &AttentionOptions::full(scale), false);
        call.output(qkv).into()
    }

    fn masked_attention_grads(
        qkv: [Float; 3],
        result: [Float; 2],
        grad: Float,
        masks: &AttentionMasks<Self>,
        scale: f64,
    ) -> [Float; 3] {
        let Some(call) = call(&qkv, masks, scale) else {
            return plain::grads::<Self>(qkv, result, grad, masks, scale);
        };
        let _noted = work::attention(&qkv[0], qkv[1].meta.shape()[0], &AttentionOptions::full(scale), true);
        call.gradients(qkv, result, grad)
    }
}

fn call(qkv: &[Float; 3], masks: &AttentionMasks<Cube>, scale: f64) -> Option<Call> {
    let [q, k, _] = qkv;
    let ([queries, batch, heads, _], keys) = (q.meta.shape().dims(), k.meta.shape()[0]);
    if !Cube::has_masked_attention(q, keys) || scale <= 0.0 {
        return None;
    }
    let bits = || masks.bits.get_or_init(|| bits(masks, [batch, heads, queries, keys], q)).clone();
    Call::of(qkv, AttentionOptions::full(scale))?.with_bits(bits)
}

/// The bits of masks for scores of this shape; `like` is on the device.
fn bits(masks: &AttentionMasks<Cube>, scores: [usize; 4], like: &Float) -> Bits {
    let hidden = masks.hidden.clone().map(|mask| {
        let mask = packed(mask);
        let shape = mask.meta.shape().dims::<4>();
        let bits = by_float!(mask, E => masks::pack_hidden::<E>(&mask.client, &mask.handle, shape));
        bits.unwrap_or_else(|error| panic!("the mask of attention: {error}"))
    });
    let kept = |Kept { draw, factor }| (masks::pack_kept(&like.client, draw, scores), factor as f32);
    Bits { hidden, kept: masks.kept.map(kept) }
}
