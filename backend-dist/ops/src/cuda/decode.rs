//! The attention of a decode step on NVIDIA GPUs.

use burn::backend::{Cube, DType, TensorMetadata};
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::decode::{DecodeShape, NewAngles, Rows, append, attention};

use super::linear::FEW;
use super::{Float, Int, columns, empty, few_rows, launched, packed, rope, rows, work, writable};
use crate::decode::{DecodeOps, PagedAttention};
use crate::options::{PackedHeads, Rotation};
use crate::{kernels::LocalKernels, moe::MoeKernels, operation::Tensors};

impl DecodeOps for Cube {
    fn op_slots_linear(x: Float, w: Float, slots: Int, experts: usize) -> Float {
        few_rows::of_slots(x, w, slots, experts, Rows::Gathered)
    }

    fn op_slots_swiglu_linear(x: Float, p: Float, w: Float, slots: Int, experts: usize) -> Float {
        few_rows::of_slots(Self::weighted_swiglu(x, p), w, slots, experts, Rows::Grouped)
    }

    fn op_paged_attention(
        qkv: Float,
        angles: Tensors<Self>,
        keys: Float,
        values: Float,
        table: Int,
        lengths: Int,
        call: PagedAttention,
    ) -> Float {
        let (qkv, angles) = to_rotate(packed(qkv), angles, call.heads);
        let sequences = lengths.meta.shape()[0];
        let slots = keys.meta.shape()[0];
        let shape = call.shape(sequences, slots / call.block_size, table.meta.shape()[0] / sequences.max(1));
        for cache in [&keys, &values] {
            let fits = cache.is_contiguous() && columns(cache) == shape.kv_heads * shape.head_dim;
            assert!(
                fits && cache.dtype == qkv.dtype,
                "a cache {:?} {:?} of {shape:?}",
                cache.meta.shape(),
                cache.dtype
            );
        }
        let _noted = work::memory("attention of a decode step", &qkv, |bytes| 2 * bytes);
        let out = empty(&qkv, [sequences, 1, shape.heads, shape.head_dim], qkv.dtype());
        let step = [&qkv, &keys, &values, &table, &lengths, &out];
        match qkv.dtype() {
            DType::F32 => run::<f32>(step, angles, shape, call),
            _ => by_half!(qkv, E => run::<E>(step, angles, shape, call)),
        }
        out
    }

    fn op_swiglu_linear(x: Float, w: Float) -> Float {
        let few = (rows(&x) <= FEW).then(|| few_rows::gated(&x, &w)).flatten();
        few.unwrap_or_else(|| Self::swiglu_forward(Self::linear_forward(x, w)))
    }
}

/// Queries, keys and values that nothing else holds, as queries are rotated in place, and the angles; without angles if
/// there is none, or the kernel does not know them, and heads are rotated already.
fn to_rotate(qkv: Float, angles: Tensors<Cube>, heads: PackedHeads) -> (Float, Option<[Float; 2]>) {
    let Ok([cos, sin]) = <[Float; 2]>::try_from(angles.floats) else { return (qkv, None) };
    let (cos, sin) = (packed(cos), packed(sin));
    let known = [&cos, &sin].iter().all(|x| x.dtype == qkv.dtype) && (2 * columns(&cos)).is_multiple_of(16);
    if !known {
        return (rope::apply(qkv, cos, sin, heads.heads + heads.kv_heads, Rotation::Forward), None);
    }
    (writable(qkv), Some([cos, sin]))
}

fn run<E: cubecl::prelude::Float>(
    [qkv, keys, values, table, lengths, out]: [&CubeTensor; 6],
    angles: Option<[Float; 2]>,
    shape: DecodeShape,
    call: PagedAttention,
) {
    let (cache, at) = ([&keys.handle, &values.handle], [&table.handle, &lengths.handle]);
    let angles = angles.as_ref().map(|[cos, sin]| {
        let rotated = 2 * columns(cos);
        NewAngles { cos: &cos.handle, sin: &sin.handle, rotated }
    });
    launched("keys of a decode step", append::<E>(&qkv.client, shape, &qkv.handle, angles, cache, at));
    let of = (call.options.scale, call.options.window);
    launched("attention of a decode step", attention::<E>(&qkv.client, shape, of, &qkv.handle, cache, at, &out.handle));
}
