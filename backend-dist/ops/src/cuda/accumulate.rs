//! Gradients added to main gradients in place.

use burn::backend::{Cube, DType, TensorMetadata};
use burn::tensor::Tensor;
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::pointwise::flat::{FloatType, Run, write};
use kernels_cubecl::pointwise::{PointwiseError, accumulate as kernels};

use super::{Float, launched, packed};

/// The tensor itself: CubeCL's buffers are shared, and not copied on write by kernels that write by handle.
pub fn in_place(view: &Tensor<1>) -> Option<Float> {
    view.clone().try_into_primitive::<Cube>().ok().filter(|view| matches!(view.device, cubecl::Device::Cuda(_)))
}

/// # Panics
/// If `sum` is not contiguous f32 or bf16 with the elements of `value`, or `value` is f64.
pub fn accumulate(value: Float, sum: &CubeTensor, add: bool) {
    let (len, [shape, from]) = (value.meta.shape().num_elements(), [sum.shape(), value.shape()]);
    let known = matches!(sum.dtype(), DType::F32 | DType::BF16);
    let fits = known && sum.is_contiguous() && shape.num_elements() == len;
    assert!(fits, "a gradient {from:?} {:?} does not fit a main gradient {shape:?} {:?}", value.dtype(), sum.dtype());
    value.assert_is_on_same_device(sum);
    if len == 0 {
        return;
    }
    let value = packed(value);
    if sum.dtype() == DType::BF16 {
        return launched("accumulation of a gradient", accumulate_in_bf16(&value, sum, len, add));
    }
    let (client, from, to) = (&value.client, &value.handle, &sum.handle);
    let done = match value.dtype() {
        DType::F32 | DType::Flex32 => kernels::accumulate::<f32>(client, from, to, len, add),
        DType::BF16 => kernels::accumulate::<half::bf16>(client, from, to, len, add),
        DType::F16 => kernels::accumulate::<half::f16>(client, from, to, len, add),
        other => panic!("a gradient in {other:?} is not added to a main gradient in f32"),
    };
    launched("accumulation of a gradient", done);
}

/// The value is rounded to bf16, and added in bf16.
fn accumulate_in_bf16(value: &CubeTensor, sum: &CubeTensor, len: usize, add: bool) -> Result<(), PointwiseError> {
    let float = match value.dtype() {
        DType::F32 | DType::Flex32 => FloatType::F32,
        DType::BF16 => FloatType::Bf16,
        DType::F16 => FloatType::F16,
        other => panic!("a gradient in {other:?} is not added to a main gradient in bf16"),
    };
    let source = Run { handle: &value.handle, float, start: 0, len };
    write(&value.client, source, Run { handle: &sum.handle, float: FloatType::Bf16, start: 0, len }, add)
}
