//! Softmax and sum normalisation of short f32 matrix rows, as in routers.

use burn::backend::{Cube, DType, TensorMetadata};
use kernels_cubecl::pointwise::normalize::{self, NormalizeShape};

use super::{Float, columns, empty, is_here, launched, packed, rows, work};
use crate::softmax::{NormalizeKernels, Normalizer, plain_grad, plain_normalize};

impl NormalizeKernels for Cube {
    fn normalize(x: Float, normalizer: Normalizer) -> [Float; 2] {
        let Some(shape) = shape(&x, normalizer) else { return plain_normalize::<Self>(x, normalizer) };
        let _noted = work::memory("normalisation", &x, |bytes| 2 * bytes);
        let eps = match normalizer {
            Normalizer::Sum { eps } => eps as f32,
            Normalizer::Softmax => 0.0,
        };
        let x = packed(x);
        let mut total = x.shape();
        let last = total.num_dims() - 1;
        total[last] = 1;
        let (y, totals) = (empty(&x, x.shape(), DType::F32), empty(&x, total, DType::F32));
        launched("normalisation", normalize::forward(&x.client, &x.handle, [&y.handle, &totals.handle], eps, shape));
        [y, totals]
    }

    fn normalize_grad([y, totals]: [Float; 2], grad: Float, normalizer: Normalizer) -> Float {
        let Some(shape) = shape(&y, normalizer).filter(|_| grad.dtype == DType::F32) else {
            return plain_grad::<Self>([y, totals], grad, normalizer);
        };
        let _noted = work::memory("normalisation gradient", &y, |bytes| 3 * bytes);
        let (y, totals, grad) = (packed(y), packed(totals), packed(grad));
        let dx = empty(&y, y.shape(), DType::F32);
        let saved = [&y.handle, &totals.handle];
        launched("normalisation gradient", normalize::backward(&y.client, saved, &grad.handle, &dx.handle, shape));
        dx
    }
}

fn shape(x: &Float, normalizer: Normalizer) -> Option<NormalizeShape> {
    let shape = NormalizeShape { rows: rows(x), columns: columns(x), softmax: normalizer == Normalizer::Softmax };
    (is_here(x) && x.dtype == DType::F32 && shape.has_kernel()).then_some(shape)
}
