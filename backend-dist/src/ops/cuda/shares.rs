//! Shares of short rows in f32, as routers have them.

use burn::backend::{Cube, DType, TensorMetadata};
use kernels_cubecl::pointwise::shares::{self, SharesShape};

use super::{Float, columns, empty, is_here, launched, packed, rows, work};
use crate::ops::shares::{Of, ShareKernels, plain_grad, plain_shares};

impl ShareKernels for Cube {
    fn shares(x: Float, of: Of) -> [Float; 2] {
        let Some(shape) = shape(&x, of) else { return plain_shares::<Self>(x, of) };
        let _noted = work::memory("shares of rows", &x, |bytes| 2 * bytes);
        let least = match of {
            Of::Numbers { least } => least as f32,
            Of::Exponentials => 0.0,
        };
        let x = packed(x);
        let mut total = x.shape();
        let last = total.num_dims() - 1;
        total[last] = 1;
        let (y, totals) = (empty(&x, x.shape(), DType::F32), empty(&x, total, DType::F32));
        launched("shares of rows", shares::forward(&x.client, &x.handle, [&y.handle, &totals.handle], least, shape));
        [y, totals]
    }

    fn shares_grad([y, totals]: [Float; 2], grad: Float, of: Of) -> Float {
        let Some(shape) = shape(&y, of).filter(|_| grad.dtype == DType::F32) else {
            return plain_grad::<Self>([y, totals], grad, of);
        };
        let _noted = work::memory("gradients of shares", &y, |bytes| 3 * bytes);
        let (y, totals, grad) = (packed(y), packed(totals), packed(grad));
        let dx = empty(&y, y.shape(), DType::F32);
        let kept = [&y.handle, &totals.handle];
        launched("gradients of shares", shares::backward(&y.client, kept, &grad.handle, &dx.handle, shape));
        dx
    }
}

fn shape(x: &Float, of: Of) -> Option<SharesShape> {
    let shape = SharesShape { rows: rows(x), columns: columns(x), softmax: of == Of::Exponentials };
    (is_here(x) && x.dtype == DType::F32 && shape.has_kernel()).then_some(shape)
}
