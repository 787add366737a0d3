//! Weights in few bits on NVIDIA GPUs.

use std::sync::Arc;

use burn::backend::{Cube, DType, TensorMetadata};
use kernels_cubecl::blockwise::kernel::dequantize;

use super::{Float, Int, empty, launched, packed, work};
use crate::blockwise::{BlockwiseOps, Layout};

impl BlockwiseOps for Cube {
    fn op_dequantize(bytes: Int, scales: Float, layout: Arc<Layout>, dtype: DType) -> Float {
        let columns = layout.sections[0].sizes.columns;
        let rows: usize = layout.sections.iter().map(|section| section.sizes.rows).sum();
        let (bytes, scales) = (packed(bytes), packed(scales));
        let _noted = work::memory("dequantize", &bytes, |bytes| bytes + rows * columns * dtype.size());
        let out = empty(&bytes, [rows, columns], dtype);
        let (client, from) = (&bytes.client, (&bytes.handle, &scales.handle));
        for (section, range) in layout.rows() {
            let to = (&out.handle, range.start * columns);
            let done = match dtype {
                DType::F32 => dequantize::<f32>(client, layout.format, from, section, to),
                DType::BF16 | DType::F16 => {
                    by_half!(out, E => dequantize::<E>(client, layout.format, from, section, to))
                }
                other => panic!("weights in few bits become f32, bf16 or f16 on GPUs, not {other:?}"),
            };
            launched("dequantize", done);
        }
        out
    }
}
