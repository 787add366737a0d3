//! Sinks of attention: one pass over the output, whichever kernel has computed it.

use burn::backend::{Cube, DType, FloatDType, TensorMetadata, ops::FloatTensorOps};
use burn::tensor::Shape;
use kernels_cubecl::pointwise::sinks::{self as kernels, SinkShape};

use super::{Float, are_floats, empty, launched, packed, reductions, work, writable};
use crate::context::kernels::OutputLse;
use crate::context::{SinkKernels, sinks_grad, with_sinks};

impl SinkKernels for Cube {
    fn add_sinks([out, lse]: OutputLse<Self>, sinks: Float) -> OutputLse<Self> {
        let Some(shape) = shape_of(&out, &lse) else {
            return with_sinks::<Self>([out, lse], sinks);
        };
        let _noted = work::memory("sinks", &out, |bytes| 2 * bytes);
        let (out, lse, sinks) = (writable(out), packed(lse), wide(sinks));
        let total = empty(&lse, lse.shape(), DType::F32);
        let statistics = [&lse.handle, &sinks.handle, &total.handle];
        let done = by_float!(out, E => kernels::add::<E>(&out.client, &out.handle, statistics, shape));
        launched("sinks", done);
        [out, total]
    }

    fn sinks_grad(out_lse @ [out, lse]: &OutputLse<Self>, grad: &Float, sinks: Float) -> Float {
        let shape = shape_of(out, lse).filter(|_| are_floats([out, grad]));
        let Some(shape) = shape else {
            return sinks_grad::<Self>(out_lse, grad, sinks);
        };
        let _noted = work::memory("gradient of sinks", out, |bytes| 2 * bytes);
        let [out, grad, lse] = [out, grad, lse].map(|x| packed(x.clone()));
        let (heads, sinks) = (shape.heads, wide(sinks));
        let products = empty(&out, [shape.seq * shape.batch, heads], DType::F32);
        let statistics = [&lse.handle, &sinks.handle, &products.handle];
        let tensors = [&out.handle, &grad.handle];
        let done = by_float!(out, E => kernels::gradient_terms::<E>(&out.client, tensors, statistics, shape));
        launched("gradient of sinks", done);
        Self::float_reshape(reductions::sum_dim(products, 0), Shape::from([heads]))
    }
}

fn wide(sinks: Float) -> Float {
    packed(if sinks.dtype() == DType::F32 { sinks } else { Cube::float_cast(sinks, FloatDType::F32) })
}

/// The sizes of an output `[s, b, h, d]` and its log-sum-exp `[b, h, s]` or longer, if there are kernels for them.
fn shape_of(out: &Float, lse: &Float) -> Option<SinkShape> {
    let (out_shape, stride) = (out.shape(), lse.shape()[2]);
    let [seq, batch, heads, head_dim] = [0, 1, 2, 3].map(|i| out_shape[i]);
    let shape = SinkShape { seq, batch, heads, head_dim, stride };
    (are_floats([out]) && lse.dtype() == DType::F32 && shape.has_kernel()).then_some(shape)
}
