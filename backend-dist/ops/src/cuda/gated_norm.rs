//! RMSNorm of a gated value.

use burn::backend::{Cube, DType, TensorMetadata};
use kernels_cubecl::pointwise::gated_norm::{self, GatedShape};

use super::{Float, are_floats, columns, empty, launched, packed, rows, work};
use crate::gated_norm::{GatedInputs, GatedNorm, GatedNormKernels};
use crate::plain;

impl GatedNormKernels for Cube {
    fn gated_norm(inputs: GatedInputs<Self>, norm: GatedNorm) -> Float {
        let GatedInputs { x, gate, w } = &inputs;
        let shape = shape(x, norm);
        if !are_floats([x, gate, w]) || !shape.has_kernel() {
            return plain::gated_norm::forward::<Self>(inputs, norm);
        }
        let _noted = work::memory("gated norm", x, |bytes| 3 * bytes);
        let [x, gate, w] = [inputs.x, inputs.gate, inputs.w].map(packed);
        let y = empty(&x, x.shape(), x.dtype());
        let (of, to) = ([&x.handle, &gate.handle, &w.handle], &y.handle);
        let done = by_float!(x, E => gated_norm::forward::<E>(&x.client, of, to, norm.eps as f32, shape));
        launched("gated norm", done);
        y
    }

    fn gated_norm_grads(inputs: GatedInputs<Self>, grad: Float, norm: GatedNorm) -> [Float; 3] {
        let GatedInputs { x, gate, w } = &inputs;
        let shape = shape(x, norm);
        if !are_floats([x, gate, w, &grad]) || !shape.has_kernel() {
            return plain::gated_norm::grads::<Self>(inputs, grad, norm);
        }
        let _noted = work::memory("gated norm gradient", x, |bytes| 5 * bytes);
        let [x, gate, w] = [inputs.x, inputs.gate, inputs.w].map(packed);
        let grad = packed(grad);
        let [dx, d_gate] = [(); 2].map(|()| empty(&x, x.shape(), x.dtype()));
        let dw = empty(&x, w.shape(), DType::F32);
        let (of, to) = ([&x.handle, &gate.handle, &w.handle], [&dx.handle, &d_gate.handle, &dw.handle]);
        let (client, dy, eps) = (&x.client, &grad.handle, norm.eps as f32);
        launched("gated norm gradient", by_float!(x, E => gated_norm::backward::<E>(client, of, dy, to, eps, shape)));
        [dx, d_gate, dw]
    }
}

fn shape(x: &Float, norm: GatedNorm) -> GatedShape {
    GatedShape { rows: rows(x), groups: norm.groups, features: columns(x) / norm.groups }
}
