//! Frozen weights in few bits (QLoRA), dequantised in front of every GEMM.

use std::ops::Range;
use std::sync::Arc;

use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor, tensor::IntTensor};
use burn::tensor::{DType, Device, Int, Shape, Tensor, TensorData};
pub use kernels_cubecl::blockwise::{Format, Section, Sizes, fp8, nf4, tables};

use super::fp8::Fp8Kernels;

/// Where the sections of a matrix are in its buffers, one after the other along the first dimension.
#[derive(Debug)]
pub(super) struct Layout {
    pub format: Format,
    pub sections: Vec<Section>,
}

impl Layout {
    /// Every section, and the matrix rows that it makes up.
    pub fn rows(&self) -> impl Iterator<Item = (&Section, Range<usize>)> {
        self.sections.iter().scan(0, |end, section| {
            let start = *end;
            *end += section.sizes.rows;
            Some((section, start..*end))
        })
    }
}

/// A matrix `[out, in]` in few bits on a device, without a gradient. Clones share its memory.
#[derive(Clone, Debug)]
pub struct QuantizedWeight {
    bytes: Tensor<1, Int>,
    scales: Tensor<1>,
    layout: Arc<Layout>,
    dtype: DType,
}

impl QuantizedWeight {
    /// A matrix of these sections, one after the other along the first dimension, whose elements become `dtype`. With
    /// [`Format::Nf4`] `scales` begin with [`tables`].
    ///
    /// # Panics
    /// If there is no section, or they do not have the same number of columns.
    pub fn new(
        format: Format,
        (bytes, scales): (Vec<u8>, Vec<f32>),
        sections: Vec<Section>,
        dtype: DType,
        device: &Device,
    ) -> Self {
        let columns = sections.first().map(|section| section.sizes.columns);
        let same = sections.iter().all(|section| Some(section.sizes.columns) == columns);
        assert!(columns.is_some() && same, "the sections of a matrix have as many columns");
        let (device, lengths) = (device.clone().without_autodiff(), [bytes.len(), scales.len()]);
        let bytes = Tensor::from_data(TensorData::new(bytes, [lengths[0]]), (&device, DType::U8));
        let scales = Tensor::from_data(TensorData::new(scales, [lengths[1]]), (&device, DType::F32));
        Self { bytes, scales, layout: Arc::new(Layout { format, sections }), dtype }
    }

    /// `[out, in]`.
    pub fn dims(&self) -> [usize; 2] {
        let rows = self.layout.sections.iter().map(|section| section.sizes.rows).sum();
        [rows, self.layout.sections[0].sizes.columns]
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        self.bytes.dims()[0] + 4 * self.scales.dims()[0]
    }

    /// The matrix, on the device without autodiff.
    pub fn value(&self) -> Tensor<2> {
        let (bytes, scales) = (self.bytes.clone().into_dispatch(), self.scales.clone().into_dispatch());
        let out = <Dispatch as BlockwiseOps>::op_dequantize(bytes, scales, self.layout.clone(), self.dtype);
        Tensor::from_dispatch(out)
    }

    /// The matrix as a backend's own.
    pub(super) fn primitive<B: Fp8Kernels>(&self) -> FloatTensor<B> {
        let [rows, columns] = self.dims();
        B::float_reshape(B::fp8_primitive(self.value().reshape([rows * columns])), Shape::from([rows, columns]))
    }
}

/// What a node needs of a weight in its backward pass.
#[derive(Clone, Debug)]
pub(super) enum Kept<B: Backend> {
    Value(FloatTensor<B>),
    /// It is recomputed.
    Stored(Box<QuantizedWeight>),
}

impl<B: Fp8Kernels> Kept<B> {
    /// Of a weight, and what it was computed from.
    pub fn of(value: &FloatTensor<B>, stored: Option<QuantizedWeight>) -> Self {
        stored.map_or_else(|| Self::Value(value.clone()), |stored| Self::Stored(stored.into()))
    }

    /// The weight.
    pub fn value(self) -> FloatTensor<B> {
        match self {
            Self::Value(value) => value,
            Self::Stored(stored) => stored.primitive::<B>(),
        }
    }
}

#[backend_extension(Flex, Cube: cfg(feature = "cuda"))]
pub(super) trait BlockwiseOps: Backend {
    fn op_dequantize(
        bytes: IntTensor<Self>,
        scales: FloatTensor<Self>,
        layout: Arc<Layout>,
        dtype: DType,
    ) -> FloatTensor<Self>;
}
