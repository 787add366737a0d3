//! The attention of a decode step on NVIDIA GPUs.

use burn::backend::{Cube, DType, TensorMetadata};
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::decode::{DecodeShape, Rows, append, attention, likeliest};

use super::{Float, Int, columns, empty, few_rows, launched, packed, rows, work};
use crate::decode::{DecodeOps, PagedAttention};
use crate::moe::MoeKernels;

impl DecodeOps for Cube {
    fn op_slots_linear(x: Float, w: Float, slots: Int, experts: usize) -> Float {
        few_rows::of_slots(x, w, slots, experts, Rows::Gathered)
    }

    fn op_slots_swiglu_linear(x: Float, p: Float, w: Float, slots: Int, experts: usize) -> Float {
        few_rows::of_slots(Self::weighted_swiglu(x, p), w, slots, experts, Rows::Grouped)
    }

    fn op_paged_attention(
        qkv: Float,
        keys: Float,
        values: Float,
        table: Int,
        lengths: Int,
        call: PagedAttention,
    ) -> Float {
        let (qkv, sequences) = (packed(qkv), lengths.meta.shape()[0]);
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
            DType::F32 => run::<f32>(step, shape, call),
            _ => by_half!(qkv, E => run::<E>(step, shape, call)),
        }
        out
    }

    fn op_likeliest(logits: Float) -> Int {
        let logits = packed(logits);
        let sizes = [rows(&logits), columns(&logits)];
        let _noted = work::memory("likeliest tokens", &logits, |bytes| bytes);
        let out = empty(&logits, [sizes[0]], DType::I32);
        let (client, handles) = (&logits.client, (&logits.handle, &out.handle));
        launched(
            "likeliest tokens",
            match logits.dtype() {
                DType::F32 => likeliest::<f32>(client, sizes, handles.0, handles.1),
                _ => by_half!(logits, E => likeliest::<E>(client, sizes, handles.0, handles.1)),
            },
        );
        out
    }
}

fn run<E: cubecl::prelude::Float>(
    [qkv, keys, values, table, lengths, out]: [&CubeTensor; 6],
    shape: DecodeShape,
    call: PagedAttention,
) {
    let (cache, at) = ([&keys.handle, &values.handle], [&table.handle, &lengths.handle]);
    launched("keys of a decode step", append::<E>(&qkv.client, shape, &qkv.handle, cache, at));
    let of = (call.options.scale, call.options.window);
    launched("attention of a decode step", attention::<E>(&qkv.client, shape, of, &qkv.handle, cache, at, &out.handle));
}
