//! The floating-point types that operations compute in.

use burn::backend::{Backend, DType, FloatDType, TensorMetadata, tensor::FloatTensor};

/// f32 for half precision: the type of sums, statistics and scales.
pub(crate) fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// `x` in another type.
pub(crate) fn cast<B: Backend>(x: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    if x.dtype() == dtype { x } else { B::float_cast(x, FloatDType::from(dtype)) }
}
