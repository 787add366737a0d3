//! Buffers on CubeCL's memory.

mod updates;

use super::chunks;
use crate::collective;
use crate::comm::{Group, ReduceOp};
use crate::cuda::{self, dense};
use crate::overlap::{self, Pending};
use crate::profile::{Operation, operation};
use burn::backend::Cube;
use burn::tensor::{DType, Device, Shape, Tensor};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::server::Handle;
use kernels_cubecl::pointwise::flat::{self, CHUNK, Chunks, Copies, FloatType, Run};
use std::fmt;
use std::ops::Range;
pub use updates::{adamw, momentum, muon_mix, muon_step};

/// A flat array in GPU memory of type `f32`, `bf16` or `f16`, or a part of one.
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

    /// A new array of zeros that keeps its place in memory; `None` where [`Buffer::fits`] says no.
    ///
    /// The largest is a quarter of the GPU's memory: more is an out-of-memory error when it is used.
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

    fn run(&self, range: Range<usize>) -> Run<'_> {
        let float = float_type(self.0.dtype).expect("buffers are of types that fit");
        Run { handle: &self.0.handle, float, start: range.start, len: range.len() }
    }

    /// Some of the elements, in the same memory.
    ///
    /// # Panics
    /// If the range ends behind the buffer.
    pub fn part(&self, range: Range<usize>) -> Self {
        let (len, width) = (self.len(), self.0.dtype.size() as u64);
        assert!(range.start <= range.end && range.end <= len, "elements {range:?} of {self:?}");
        let (before, after) = (range.start as u64 * width, (len - range.end) as u64 * width);
        let handle = self.0.handle.clone().offset_start(before).offset_end(after);
        let (client, device) = (self.0.client.clone(), self.0.device.clone());
        Self(CubeTensor::new_contiguous(client, device, Shape::from([range.len()]), handle, self.0.dtype))
    }

    /// The elements as a tensor, in the same memory. Burn never writes to it, since this buffer holds the memory too.
    pub fn tensor(&self) -> Tensor<1> {
        Tensor::from_primitive::<Cube>(self.0.clone())
    }

    /// Replaces elements from `at` on, rounding to the buffer's type.
    ///
    /// # Panics
    /// If the values are on another kind of device, or reach behind the buffer.
    pub fn put(&self, at: usize, values: Tensor<1>) {
        self.write(at, values, false);
    }

    /// Adds to elements from `at` on, in the buffer's type.
    ///
    /// # Panics
    /// As [`Buffer::put`].
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
    /// If the range ends behind the buffer.
    pub fn clear(&self, range: Range<usize>) {
        cuda::clear(&self.part(range).0);
    }

    /// Starts to sum the elements over the group. Nobody may touch the buffer before [`Wait::wait`].
    pub fn all_reduce(&self, group: &Group) -> Wait {
        if group.size() == 1 {
            return Wait(None);
        }
        if self.is_linked(group) {
            return Wait(Some(overlap::all_reduce_in_place(&self.tensor(), group)));
        }
        self.put(0, collective::all_reduce(self.tensor(), ReduceOp::Sum, group));
        Wait(None)
    }

    /// Starts to write this rank's part of the sum over the group to `target`, which may be that part of this buffer.
    /// Nobody may touch either before [`Wait::wait`].
    pub fn reduce_scatter(&self, target: &Buffer, group: &Group) -> Wait {
        if self.is_linked(group) {
            return Wait(Some(overlap::reduce_scatter_into(&self.tensor(), &target.tensor(), group)));
        }
        target.put(0, collective::reduce_scatter(self.tensor(), 0, group));
        Wait(None)
    }

    /// Starts to fill this buffer with all ranks' `own` parts, which may be this rank's part of the buffer. Nobody may
    /// touch either before [`Wait::wait`].
    pub fn all_gather(&self, own: &Buffer, group: &Group) -> Wait {
        if self.is_linked(group) {
            return Wait(Some(overlap::all_gather_into(&own.tensor(), &self.tensor(), group)));
        }
        self.put(0, collective::all_gather(own.tensor(), 0, group));
        Wait(None)
    }

    /// Whether every member has a GPU of its own; the same on all of them.
    fn is_linked(&self, group: &Group) -> bool {
        overlap::has_device_link(group, &self.tensor().device())
    }
}

/// A collective that runs beside the compute stream.
#[must_use = "nobody may touch the buffers before `wait`"]
pub struct Wait(Option<Pending>);

impl Wait {
    /// What the thread issues from now on finds the result; the host does not wait.
    pub fn wait(self) {
        if let Some(pending) = self.0 {
            pending.wait();
        }
    }
}

impl fmt::Debug for Wait {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Wait({})", if self.0.is_some() { "running" } else { "done" })
    }
}

/// Where the tensors of a buffer end, in GPU memory.
pub struct TensorTable {
    ends: Handle,
    decays: Handle,
    tensors: usize,
}

impl fmt::Debug for TensorTable {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "TensorTable({} tensors)", self.tensors)
    }
}

impl TensorTable {
    /// For `buffer`: one past the last element of each tensor and the gap behind it, rising up to the buffer's length,
    /// and whether it decays.
    ///
    /// # Panics
    /// If the last tensor does not end with the buffer.
    pub fn new(buffer: &Buffer, ends: &[u32], decays: &[bool]) -> Self {
        assert_eq!(ends.last().map(|&end| end as usize), Some(buffer.len()), "the last tensor ends with {buffer:?}");
        assert_eq!(ends.len(), decays.len(), "one flag for each tensor");
        let decays: Vec<u32> = decays.iter().copied().map(u32::from).collect();
        Self { ends: table(&buffer.0, ends), decays: table(&buffer.0, &decays), tensors: ends.len() }
    }
}

/// Ranges of a buffer, cut into chunks, in GPU memory.
pub struct ChunkTable {
    starts: Handle,
    lens: Handle,
    /// Chunks of each range.
    counts: Vec<usize>,
    end: usize,
    elements: usize,
}

impl fmt::Debug for ChunkTable {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "ChunkTable({} ranges)", self.counts.len())
    }
}

impl ChunkTable {
    /// For `buffer`.
    ///
    /// # Panics
    /// If a range ends behind the buffer.
    pub fn new(buffer: &Buffer, ranges: &[Range<usize>]) -> Self {
        let end = ranges.iter().map(|range| range.end).max().unwrap_or(0);
        assert!(end <= buffer.len(), "elements up to {end} of {buffer:?}");
        let (starts, lens, counts) = chunks(ranges, CHUNK);
        let elements = ranges.iter().map(Range::len).sum();
        Self { starts: table(&buffer.0, &starts), lens: table(&buffer.0, &lens), counts, end, elements }
    }

    fn len(&self) -> usize {
        self.counts.iter().sum()
    }
}

/// Ranges of a buffer that are collected in another one, one behind the other.
pub struct PieceTable {
    apart: Handle,
    close: Handle,
    lens: Handle,
    chunks: usize,
    /// One past the last element in the buffer, and the number of elements.
    ends: [usize; 2],
}

impl fmt::Debug for PieceTable {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "PieceTable({} elements)", self.len())
    }
}

impl PieceTable {
    /// For `buffer`.
    ///
    /// # Panics
    /// If a range ends behind the buffer.
    pub fn new(buffer: &Buffer, ranges: &[Range<usize>]) -> Self {
        let end = ranges.iter().map(|range| range.end).max().unwrap_or(0);
        assert!(end <= buffer.len(), "elements up to {end} of {buffer:?}");
        let (apart, lens, _) = chunks(ranges, CHUNK);
        let mut len = 0;
        let place = |count: &u32| {
            len += count;
            len - count
        };
        let close: Vec<u32> = lens.iter().map(place).collect();
        let [apart, close, lens] = [apart, close, lens].map(|values| (table(&buffer.0, &values), values.len()));
        let (ends, chunks) = ([end, len as usize], lens.1);
        Self { apart: apart.0, close: close.0, lens: lens.0, chunks, ends }
    }

    /// Elements of all ranges.
    pub fn len(&self) -> usize {
        self.ends[1]
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the ranges of `buffer` to the beginning of `packed`.
    ///
    /// # Panics
    /// If a buffer is not `f32` or too short.
    pub fn collect(&self, buffer: &Buffer, packed: &Buffer) {
        self.copy(buffer, packed, [&self.apart, &self.close], self.ends);
    }

    /// Copies the beginning of `packed` to the ranges of `buffer`.
    ///
    /// # Panics
    /// As [`PieceTable::collect`].
    pub fn distribute(&self, packed: &Buffer, buffer: &Buffer) {
        self.copy(packed, buffer, [&self.close, &self.apart], [self.ends[1], self.ends[0]]);
    }

    fn copy(&self, source: &Buffer, target: &Buffer, [from, to]: [&Handle; 2], ends: [usize; 2]) {
        assert!([source, target].iter().all(|of| of.0.dtype == DType::F32), "pieces are f32");
        let copies = Copies { from, to, lens: &self.lens, count: self.chunks, ends };
        flat::copy(&source.0.client, &source.0.handle, &target.0.handle, copies)
            .unwrap_or_else(|error| panic!("copying {self:?} from {source:?} to {target:?}: {error}"));
    }
}

/// The sum of squares of each range of each `f32` buffer, with one wait for the GPU. The same bits every time. The last buffer
/// comes first, as gradients do; `ready(i)` is called before buffer `i` is read.
///
/// # Panics
/// If a buffer is shorter than its table says, or the GPU has failed.
pub fn squares(buffers: &[(&Buffer, &ChunkTable)], ready: impl Fn(usize)) -> Vec<Vec<f64>> {
    let Some((Buffer(some), _)) = buffers.first() else { return Vec::new() };
    let total: usize = buffers.iter().map(|(_, table)| table.len()).sum();
    let client = &some.client;
    let sums = client.empty(4 * total.max(1));
    let mut first = total;
    for (index, (buffer, table)) in buffers.iter().enumerate().rev() {
        assert_eq!(buffer.0.dtype, DType::F32, "squares are summed in f32");
        ready(index);
        let count = table.len();
        first -= count;
        let _noted = operation(&buffer.0, || Operation::optimizer("sum of squares", 4 * table.elements));
        let chunks = Chunks { starts: &table.starts, lens: &table.lens, count, end: table.end };
        flat::squares(client, &buffer.0.handle, chunks, &sums, first)
            .unwrap_or_else(|error| panic!("squares of {buffer:?}: {error}"));
    }
    if total == 0 {
        return buffers.iter().map(|(_, table)| vec![0.0; table.counts.len()]).collect();
    }
    let bytes = client.read_one(sums).unwrap_or_else(|error| panic!("reading the sums of squares: {error:?}"));
    let mut sums = bytemuck::pod_collect_to_vec::<u8, f32>(&bytes).into_iter().map(f64::from);
    let of = |table: &ChunkTable| table.counts.iter().map(|&count| sums.by_ref().take(count).sum()).collect();
    let mut of = of;
    buffers.iter().map(|(_, table)| of(table)).collect()
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

/// Numbers in memory of their own, at least one.
fn table(near: &CubeTensor, values: &[u32]) -> Handle {
    near.client.create_from_slice(bytemuck::cast_slice(if values.is_empty() { &[0] } else { values }))
}
