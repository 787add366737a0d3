//! The causal convolution in front of a linear recurrence.

use burn::backend::{Cube, DType, TensorMetadata};
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::pointwise::convolution::{self, ConvolutionShape, Inputs};

use super::{Float, are_floats, empty, launched, packed, part, work};
use crate::convolution::{ConvolutionGrads, ConvolutionInputs, ConvolutionKernels};
use crate::plain;

impl ConvolutionKernels for Cube {
    fn convolution(inputs: ConvolutionInputs<Self>) -> Float {
        if !has_kernel(&inputs) {
            return plain::convolution::forward::<Self>(inputs);
        }
        let _noted = work::memory("convolution", &inputs.x, |bytes| 2 * bytes);
        let (inputs, shape) = (prepared(&inputs), shape(&inputs));
        let y = empty(&inputs.x, inputs.x.shape(), inputs.x.dtype());
        let client = &inputs.x.client;
        launched(
            "convolution",
            by_float!(y, E => convolution::forward::<E>(client, buffers(&inputs), &y.handle, shape)),
        );
        y
    }

    fn convolution_grads(inputs: ConvolutionInputs<Self>, grad: Float) -> ConvolutionGrads<Self> {
        if !has_kernel(&inputs) || grad.dtype() != inputs.x.dtype() {
            return plain::convolution::grads::<Self>(inputs, grad);
        }
        let _noted = work::memory("convolution gradient", &inputs.x, |bytes| 3 * bytes);
        let (inputs, shape, grad) = (prepared(&inputs), shape(&inputs), packed(grad));
        let (weights, features) = (shape.features * shape.kernel, shape.features);
        let dx = empty(&inputs.x, inputs.x.shape(), inputs.x.dtype());
        let sums = empty(&dx, [weights + features], DType::F32);
        let (client, to) = (&dx.client, [&dx.handle, &sums.handle]);
        let done = by_float!(dx, E => convolution::backward::<E>(client, buffers(&inputs), &grad.handle, to, shape));
        launched("convolution gradient", done);
        ConvolutionGrads {
            w: part(&sums, 0, [features, shape.kernel]),
            bias: inputs.bias.map(|_| part(&sums, weights, [features])),
            x: dx,
        }
    }
}

fn has_kernel(inputs: &ConvolutionInputs<Cube>) -> bool {
    are_floats([&inputs.x, &inputs.w])
        && inputs.bias.as_ref().is_none_or(|bias| bias.dtype() == inputs.x.dtype())
        && shape(inputs).has_kernel()
}

fn shape(inputs: &ConvolutionInputs<Cube>) -> ConvolutionShape {
    let (x, w) = (inputs.x.shape(), inputs.w.shape());
    ConvolutionShape { seq: x[0], samples: x[1], features: x[2], kernel: w[1] }
}

/// In the layout of the kernels.
fn prepared(inputs: &ConvolutionInputs<Cube>) -> ConvolutionInputs<Cube> {
    let of = |x: &CubeTensor| packed(x.clone());
    ConvolutionInputs {
        x: of(&inputs.x),
        w: of(&inputs.w),
        bias: inputs.bias.as_ref().map(of),
        ages: inputs.ages.as_ref().map(of),
    }
}

fn buffers(inputs: &ConvolutionInputs<Cube>) -> Inputs<'_> {
    Inputs {
        x: &inputs.x.handle,
        weight: &inputs.w.handle,
        bias: inputs.bias.as_ref().map(|bias| &bias.handle),
        ages: inputs.ages.as_ref().map(|ages| &ages.handle),
    }
}
