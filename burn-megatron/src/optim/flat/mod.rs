//! Flat arrays of a rank: gradients, moments, shards of weights. Updated in place in host memory on CPU ranks and in GPU
//! memory, tensor operations elsewhere (`f64` on GPUs).

mod sums;

use super::real::Real;
use backend_dist::gpu::buffer::Buffer;
use backend_dist::shard::{HostFloats, element, into_data};
use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Device, Tensor, TensorData};
use std::ops::Range;

/// A one-dimensional array in the type that sums are kept in, `f64` for `f64` weights, else `f32`; moments also in
/// `bf16`.
///
/// On the host, writes happen in place unless somebody else holds the storage, which is copied then. A buffer is always
/// written in place.
pub(super) struct Flat {
    /// Always there between calls; taken out so that a write finds it unshared. Shares the memory of the buffer.
    tensor: Option<Tensor<1>>,
    /// GPU memory with a fixed address.
    buffer: Option<Buffer>,
    /// The memory is counted where it was allocated.
    borrowed: bool,
    dtype: DType,
    len: usize,
    /// Storage is host memory.
    host: bool,
}

/// Runs an expression with `$float` as the host type of `$dtype`.
macro_rules! with_float {
    ($dtype:expr, $float:ident => $body:expr) => {
        match $dtype {
            burn::tensor::DType::F64 => {
                type $float = f64;
                $body
            }
            burn::tensor::DType::BF16 => {
                type $float = half::bf16;
                $body
            }
            _ => {
                type $float = f32;
                $body
            }
        }
    };
}
pub(super) use with_float;

/// The type in which gradients and states of weights of type `param` are kept.
pub(super) fn wide(param: DType) -> DType {
    if param == DType::F64 { DType::F64 } else { DType::F32 }
}

impl Flat {
    pub fn zeros(len: usize, device: &Device, dtype: DType) -> Self {
        if let Some(buffer) = Buffer::zeros(len, device, dtype) {
            return Self::whole(buffer, dtype, len);
        }
        if Tensor::<1>::empty([1], (device, dtype)).try_into_primitive::<Flex>().is_err() {
            return Self::new(Tensor::zeros([len], (device, dtype)));
        }
        // `Tensor::zeros` holds the array twice for a moment.
        let data =
            with_float!(dtype, Float => TensorData::new(vec![<Float as bytemuck::Zeroable>::zeroed(); len], [len]));
        Self::new(Tensor::from_primitive::<Flex>(FlexTensor::from_data(data)))
    }

    /// All `len` elements of a buffer.
    pub fn whole(buffer: Buffer, dtype: DType, len: usize) -> Self {
        Self { borrowed: false, ..Self::over(buffer, dtype, len) }
    }

    /// The `len` elements of a view of a buffer.
    pub fn over(buffer: Buffer, dtype: DType, len: usize) -> Self {
        Self { tensor: Some(buffer.tensor()), buffer: Some(buffer), borrowed: true, dtype, len, host: false }
    }

    /// Takes over a tensor of type `f32`, `f64` or `bf16`.
    pub fn new(tensor: Tensor<1>) -> Self {
        let (dtype, len) = (tensor.dtype(), tensor.dims()[0]);
        let (buffer, borrowed) = (None, false);
        match tensor.clone().try_into_primitive::<Flex>() {
            Err(_) => Self { tensor: Some(tensor), buffer, borrowed, dtype, len, host: false },
            Ok(host) => {
                drop(tensor);
                // Writes take the whole storage, which a view has only a part of.
                let whole = host.bytes().len() == len * dtype.size() && host.is_contiguous();
                let host = if whole { host } else { FlexTensor::from_data(host.into_data()) };
                let tensor = Some(Tensor::from_primitive::<Flex>(host));
                Self { tensor, buffer, borrowed, dtype, len, host: true }
            }
        }
    }

    /// The same with tensor operations only, which are for devices.
    #[cfg(test)]
    pub fn off_host(mut self) -> Self {
        self.host = false;
        self
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn bytes(&self) -> u64 {
        if self.borrowed { 0 } else { (self.len * self.dtype.size()) as u64 }
    }

    /// The GPU memory of the elements, at a fixed address.
    pub fn buffer(&self) -> Option<&Buffer> {
        self.buffer.as_ref()
    }

    pub fn is_on_host(&self) -> bool {
        self.host
    }

    pub fn device(&self) -> Device {
        self.tensor().device()
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    fn tensor(&self) -> &Tensor<1> {
        self.tensor.as_ref().expect("the tensor is in place between calls")
    }

    pub fn into_tensor(self) -> Tensor<1> {
        self.tensor.expect("the tensor is in place between calls")
    }

    /// Whether somebody else holds the same storage, as members of a group do after a reduction on the host.
    pub fn is_shared(&mut self) -> bool {
        if !self.host {
            return false;
        }
        let host = self.take_host();
        let shared = !host.is_unique();
        self.put_host(host);
        shared
    }

    /// For reading on the host.
    pub fn view(&self) -> View {
        View(self.tensor().clone().try_into_primitive::<Flex>().expect("the array is in host memory"))
    }

    /// Takes the storage out to write to it on the host.
    pub fn take_host(&mut self) -> FlexTensor {
        let tensor = self.tensor.take().expect("the tensor is in place between calls");
        tensor.try_into_primitive::<Flex>().expect("the array is in host memory")
    }

    /// Puts back what [`Flat::take_host`] has taken.
    pub fn put_host(&mut self, host: FlexTensor) {
        self.tensor = Some(Tensor::from_primitive::<Flex>(host));
    }

    /// A copy or a view of some elements, to be used up before the next write.
    pub fn part(&self, range: Range<usize>) -> Tensor<1> {
        self.tensor().clone().slice([range])
    }

    /// Replaces elements from `at` on.
    pub fn put(&mut self, at: usize, values: Tensor<1>) {
        if let Some(buffer) = &self.buffer {
            return buffer.put(at, values);
        }
        let (values, range) = self.fitting(at, values);
        if self.host {
            self.write(range, values, false);
        } else {
            let tensor = self.tensor.take().expect("the tensor is in place between calls");
            self.tensor = Some(tensor.slice_assign([range], values));
        }
    }

    /// Adds to elements from `at` on.
    pub fn add(&mut self, at: usize, values: Tensor<1>) {
        if let Some(buffer) = &self.buffer {
            return buffer.add(at, values);
        }
        let (values, range) = self.fitting(at, values);
        if self.host {
            self.write(range, values, true);
        } else {
            let sum = self.part(range.clone()) + values;
            let tensor = self.tensor.take().expect("the tensor is in place between calls");
            self.tensor = Some(tensor.slice_assign([range], sum));
        }
    }

    fn fitting(&self, at: usize, values: Tensor<1>) -> (Tensor<1>, Range<usize>) {
        let range = at..at + values.dims()[0];
        (values.cast(self.dtype), range)
    }

    fn write(&mut self, range: Range<usize>, values: Tensor<1>, add: bool) {
        let values = values.try_into_primitive::<Flex>().expect("values are where the array is");
        let values = View(if values.is_contiguous() { values } else { values.to_contiguous() });
        let mut host = self.take_host();
        with_float!(self.dtype, Float => {
            let (target, values) = (&mut Float::write(&mut host)[range], values.read::<Float>());
            if add {
                target.iter_mut().zip(values).for_each(|(target, value)| *target += value);
            } else {
                target.copy_from_slice(values);
            }
        });
        self.put_host(host);
    }

    /// Sets elements to zero.
    pub fn clear(&mut self, range: Range<usize>) {
        if let Some(buffer) = &self.buffer {
            buffer.clear(range);
        } else if !range.is_empty() {
            let zeros = Self::zeros(range.len(), &self.tensor().device(), self.dtype);
            self.put(range.start, zeros.into_tensor());
        }
    }

    /// The same elements in memory of their own.
    pub fn copy(&self) -> Self {
        let mut copy = Self::zeros(self.len, &self.device(), self.dtype);
        copy.put(0, self.part(0..self.len));
        copy
    }

    /// `decay · self + (1 − decay) · other`, by element.
    pub fn approach(&mut self, other: &Self, decay: f64) {
        if !self.host {
            let all = 0..self.len;
            let next = self.part(all.clone()).mul_scalar(decay) + other.part(all).mul_scalar(1.0 - decay);
            return self.put(0, next);
        }
        let (other, mut host) = (other.view(), self.take_host());
        with_float!(self.dtype, Float => {
            let (keep, rest) = (<Float as Real>::of(decay), <Float as Real>::of(1.0 - decay));
            let values = Float::write(&mut host).iter_mut().zip(other.read::<Float>());
            values.for_each(|(value, other)| *value = keep * *value + rest * *other);
        });
        self.put_host(host);
    }

    /// Some elements as the host's widest type.
    pub fn values(&self, range: Range<usize>) -> Vec<f64> {
        self.part(range).into_data().iter::<f64>().collect()
    }

    /// Replaces elements from `at` on.
    pub fn put_floats(&mut self, at: usize, values: HostFloats) {
        let values = into_data(values.convert(element(self.dtype)));
        self.put(at, Tensor::from_data(values, (&self.tensor().device(), self.dtype)));
    }
}

/// A host array for reading. While it lives, writes to the array copy the storage.
pub(super) struct View(FlexTensor);

impl View {
    pub fn read<E: Real>(&self) -> &[E] {
        E::read(&self.0).expect("flat arrays are contiguous and of the type they are read as")
    }
}

/// A tensor with its own storage, so that it does not keep a larger one alive.
pub(super) fn own(tensor: Tensor<1>) -> Tensor<1> {
    match tensor.clone().try_into_primitive::<Flex>() {
        Err(_) => tensor,
        Ok(host) => {
            drop(tensor);
            Tensor::from_primitive::<Flex>(FlexTensor::from_data(host.into_data()))
        }
    }
}
