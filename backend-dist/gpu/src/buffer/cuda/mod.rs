//! Buffers on CubeCL's memory.

mod ranges;
mod squares;
mod updates;

use crate::cuda::{self, dense};
use crate::profile::{Operation, operation};
use burn::backend::Cube;
use burn::tensor::{DType, Device, Shape, Tensor};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::server::Handle;
use kernels_cubecl::pointwise::flat::{self, FloatType, Run};
use std::fmt;
use std::ops::Range;

pub use ranges::RangeTable;
pub use squares::{ChunkTable, squares};
pub use updates::{TensorTable, adamw, encode_blocks, join_masters, momentum, muon_mix, muon_step, split_masters};

/// A flat array of type `f32`, `bf16` or `f16` in GPU memory, or a slice of one.
#[derive(Clone)]
pub struct Buffer(CubeTensor);

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Buffer({} × {:?} on {:?})", self.len(), self.0.dtype, self.0.device)
    }
}

impl Buffer {
    /// Whether there are buffers of this type on this device.
    pub fn fits(device: &Device, dtype: DType) -> bool {
        float_type(dtype).is_some() && anchor(device).is_some()
    }

    /// A new array of zeros with a fixed address; `None` unless [`Buffer::fits`].
    ///
    /// The maximum is a quarter of the GPU's memory: a larger one is an out-of-memory error when it is used.
    pub fn zeros(len: usize, device: &Device, dtype: DType) -> Option<Self> {
        float_type(dtype)?;
        let anchor = anchor(device)?;
        let (client, device) = (anchor.client.clone(), anchor.device.clone());
        let buffer = client.clone().memory_persistent_allocation((), move |()| {
            Self(empty_device_contiguous_dtype(client, device, Shape::from([len]), dtype))
        });
        buffer.clear(0..len);
        Some(buffer)
    }

    fn len(&self) -> usize {
        self.0.meta.shape()[0]
    }

    /// Bytes of the elements.
    pub fn bytes(&self) -> usize {
        self.len() * self.0.dtype.size()
    }

    pub(crate) fn cube(&self) -> &CubeTensor {
        &self.0
    }

    fn run(&self, range: Range<usize>) -> Run<'_> {
        let float = float_type(self.0.dtype).expect("buffers are of types that fit");
        Run { handle: &self.0.handle, float, start: range.start, len: range.len() }
    }

    /// A slice of the elements, in the same memory.
    ///
    /// # Panics
    /// If the range ends after the buffer.
    pub fn part(&self, range: Range<usize>) -> Self {
        let (len, width) = (self.len(), self.0.dtype.size() as u64);
        assert!(range.start <= range.end && range.end <= len, "elements {range:?} of {self:?}");
        let (before, after) = (range.start as u64 * width, (len - range.end) as u64 * width);
        let handle = self.0.handle.clone().offset_start(before).offset_end(after);
        let (client, device) = (self.0.client.clone(), self.0.device.clone());
        Self(CubeTensor::new_contiguous(client, device, Shape::from([range.len()]), handle, self.0.dtype))
    }

    /// The elements as a tensor, in the same memory. Burn never writes to it, because this buffer is a second owner of
    /// the memory.
    pub fn tensor(&self) -> Tensor<1> {
        Tensor::from_primitive::<Cube>(self.0.clone())
    }

    /// Replaces elements from `at` on, rounding to the buffer's type.
    ///
    /// # Panics
    /// If the values are on another kind of device, or end after the buffer.
    pub fn put(&self, at: usize, values: Tensor<1>) {
        self.write(at, values, false);
    }

    /// Adds to elements from `at` on, in the buffer's type.
    pub fn add(&self, at: usize, values: Tensor<1>) {
        self.write(at, values, true);
    }

    fn write(&self, at: usize, values: Tensor<1>, adds: bool) {
        let values = if float_type(values.dtype()).is_some() { values } else { values.cast(DType::F32) };
        let values = Self(dense(primitive(values)));
        let len = values.len();
        let bytes = || values.0.dtype.size() + self.0.dtype.size() * (1 + usize::from(adds));
        let _noted = operation(&self.0, || Operation::memory("write to a flat buffer", len * bytes()));
        flat::write(&self.0.client, values.run(0..len), self.run(at..at + len), adds)
            .unwrap_or_else(|error| panic!("writing {values:?} to {self:?} at {at}: {error}"));
    }

    /// Sets elements to zero.
    ///
    /// # Panics
    /// If the range ends after the buffer.
    pub fn clear(&self, range: Range<usize>) {
        cuda::clear(&self.part(range).0);
    }
}

/// Some tensor on the device, if that is a GPU.
fn anchor(device: &Device) -> Option<CubeTensor> {
    let anchor = Tensor::<1>::empty([1], (device, DType::F32)).try_into_primitive::<Cube>().ok()?;
    matches!(anchor.device, cubecl::Device::Cuda(_)).then_some(anchor)
}

fn primitive(tensor: Tensor<1>) -> CubeTensor {
    tensor.try_into_primitive::<Cube>().unwrap_or_else(|error| panic!("the values are not on the GPU: {error:?}"))
}

fn float_type(dtype: DType) -> Option<FloatType> {
    match dtype {
        DType::F32 => Some(FloatType::F32),
        DType::BF16 => Some(FloatType::Bf16),
        DType::F16 => Some(FloatType::F16),
        _ => None,
    }
}

/// Numbers in a separate allocation, at least one.
fn table(near: &CubeTensor, values: &[u32]) -> Handle {
    near.client.create_from_slice(bytemuck::cast_slice(if values.is_empty() { &[0] } else { values }))
}
