//! Raw pointers and the CUDA stream of the calling thread for CubeCL's tensors.

pub mod lt;
pub mod lt_fp8;
mod lt_plan;
mod pinned;
mod rows;
pub mod watch;

pub use pinned::PinnedBuffer;
pub use rows::packed_rows;

use crate::failed;
use crate::{abandoned, allocator};
use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::{copy_contiguous, into_contiguous};
use burn_cubecl::tensor::CubeTensor;
use cubecl_common::device::{Device, DeviceId};
use cubecl_common::device_handle::DeviceHandle;
use cubecl_environment::backtrace::BackTrace;
use cubecl_environment::stream::StreamId;
use cubecl_runtime::memory_management::ManagedMemoryHandle;
use cubecl_runtime::server::{Handle, Server, ServerError, ServerStorage};
use cubecl_server::storage::ComputeStorage;
use cubecl_server::stream::{FailureStore, WriteScoped};
use cudarc::driver::result as driver;
use cudarc::driver::sys::{CUdeviceptr, CUstream};
use layouts::sizes::size_class;
use std::ffi::c_void;
use std::sync::LazyLock;

type CudaServer = <cubecl::cuda::CudaRuntime as cubecl_server::runtime::Runtime>::Server;

/// Whether memory that nobody has written is NaN.
static POISON: LazyLock<bool> = LazyLock::new(|| std::env::var_os("BURN_MEGATRON_POISON").is_some_and(|on| on == "1"));

/// Runs `work(pointers, compute stream)` on CubeCL's thread, after all that this thread has launched before; does not
/// wait. The buffers are held until `work` returns. An error is passed to `failed`, and CubeCL refuses to read the
/// buffers from then on.
///
/// # Panics
/// If earlier work on the device failed, see [`failed`](crate::failed).
pub fn submit<const N: usize>(
    tensors: [&CubeTensor; N],
    work: impl FnOnce([*mut c_void; N], CUstream) -> Result<(), String> + Send + 'static,
    failed: impl FnOnce(String) + Send + 'static,
) {
    submit_new(None, tensors, work, failed);
}

/// [`submit`], of tensors of which one may be new: CubeCL's thread takes its memory first.
///
/// # Panics
/// As [`submit`].
pub(crate) fn submit_new<const N: usize>(
    new: Option<Planned>,
    tensors: [&CubeTensor; N],
    work: impl FnOnce([*mut c_void; N], CUstream) -> Result<(), String> + Send + 'static,
    failed: impl FnOnce(String) + Send + 'static,
) {
    let work = move |pointers: Vec<_>, stream| work(std::array::from_fn(|i| pointers[i]), stream);
    submit_planned(new, &tensors, work, failed);
}

/// [`submit`] of any number of tensors, but of one at least.
///
/// # Panics
/// As [`submit`].
pub fn submit_all(
    tensors: &[&CubeTensor],
    work: impl FnOnce(Vec<*mut c_void>, CUstream) -> Result<(), String> + Send + 'static,
    failed: impl FnOnce(String) + Send + 'static,
) {
    submit_planned(None, tensors, work, failed);
}

fn submit_planned(
    new: Option<Planned>,
    tensors: &[&CubeTensor],
    work: impl FnOnce(Vec<*mut c_void>, CUstream) -> Result<(), String> + Send + 'static,
    failed: impl FnOnce(String) + Send + 'static,
) {
    let device = tensors[0].client.service_id().device;
    failed::check(device.index_id);
    let device = DeviceHandle::<CudaServer>::new(device);
    // Bindings hold the memory as handles do, but whoever has the last handle may still write in place: what is queued
    // before runs before.
    let bindings: Vec<_> = tensors.iter().map(|tensor| tensor.handle.clone().binding()).collect();
    let stream_id = StreamId::current();
    device.submit(move |server: &mut CudaServer| {
        new.into_iter().for_each(|new| new.take(server));
        let queue = || -> Result<(), String> {
            let mut resources = Vec::with_capacity(bindings.len());
            for binding in &bindings {
                let resource = server.get_resource(binding.clone(), stream_id);
                resources.push(resource.map_err(|error| format!("{error:?}"))?);
            }
            let stream = server.write_streams().try_stream_mut(&stream_id).ok_or("the compute stream is gone")?;
            // Pages that CubeCL has emptied after switching to larger ones stay allocated, but uncounted, until it
            // flushes.
            stream.memory_management_gpu.storage().flush();
            let pointers = resources.iter().map(|resource| resource.resource().ptr as *mut c_void).collect();
            work(pointers, stream.sys)
        };
        if let Err(message) = queue() {
            let error = ServerError::Generic { reason: message.clone(), backtrace: BackTrace::default() };
            server.write_streams().taint(error, bindings.iter());
            failed(message);
        }
    });
}

/// Runs `work(compute stream)` on CubeCL's thread, between the launches of this thread before and after this call; does
/// not wait. There is no stream if the thread has not launched anything yet.
pub fn mark(device: DeviceId, work: impl FnOnce(Option<CUstream>) + Send + 'static) {
    let stream_id = StreamId::current();
    DeviceHandle::<CudaServer>::new(device).submit(move |server: &mut CudaServer| {
        work(server.write_streams().try_stream_mut(&stream_id).map(|stream| stream.sys));
    });
}

/// An uninitialised contiguous tensor on the device of `like`, in a buffer of a [`size_class`]. With
/// `BURN_MEGATRON_POISON=1` it is filled with NaN, so that a read of what nobody has written shows.
pub fn empty(like: &CubeTensor, shape: Shape, dtype: DType) -> CubeTensor {
    empty_all(like, [(shape, dtype)]).remove(0)
}

/// [`empty`] of several, in one task of CubeCL's thread.
pub fn empty_all(like: &CubeTensor, tensors: impl IntoIterator<Item = (Shape, DType)>) -> Vec<CubeTensor> {
    let (tensors, memory): (Vec<_>, Vec<_>) =
        tensors.into_iter().map(|(shape, dtype)| planned(like, shape, dtype)).unzip();
    DeviceHandle::<CudaServer>::new(like.client.service_id().device).submit(move |server: &mut CudaServer| {
        memory.into_iter().for_each(|memory| memory.take(server));
    });
    if *POISON {
        tensors.iter().for_each(|tensor| fill(tensor, 0xff));
    }
    tensors
}

/// Memory of a tensor that CubeCL's thread has yet to take.
#[must_use]
pub(crate) struct Planned {
    memory: ManagedMemoryHandle,
    bytes: u64,
    stream: StreamId,
}

impl Planned {
    fn take(self, server: &mut CudaServer) {
        // Whoever reads the tensor gets the error.
        let _ = server.initialize_memory(self.memory, self.bytes, self.stream);
    }
}

/// [`empty`] of which the memory is still to be taken.
pub(crate) fn planned(like: &CubeTensor, shape: Shape, dtype: DType) -> (CubeTensor, Planned) {
    let bytes = shape.num_elements() * dtype.size();
    // As CubeCL's own tensors.
    let alignment = like.client.properties().memory.alignment;
    let held = (size_class(bytes) as u64).next_multiple_of(alignment);
    let stream = StreamId::current();
    let handle = Handle::new(like.client.service_id(), stream, held);
    let planned = Planned { memory: handle.memory.clone(), bytes: held, stream };
    let handle = handle.offset_end(held - bytes as u64);
    (CubeTensor::new_contiguous(like.client.clone(), like.device.clone(), shape, handle, dtype), planned)
}

/// Sets all bytes of the contiguous tensor to zero, in the order of the compute stream.
pub fn clear(x: &CubeTensor) {
    fill(x, 0);
}

/// Sets all bytes of the contiguous tensor to `byte`, in the order of the compute stream.
pub fn fill(x: &CubeTensor, byte: u8) {
    let bytes = x.meta.shape().num_elements() * x.dtype.size();
    let held = x.handle.size_in_used() as usize;
    assert!(x.is_contiguous() && bytes <= held, "to be filled: {x:?} in a buffer of {held} bytes");
    if bytes == 0 {
        return;
    }
    let device = x.client.service_id().device;
    submit(
        [x],
        move |[pointer], stream| {
            // SAFETY: the buffer has this many bytes and is held until the work is queued on the stream that orders
            // its reuse.
            unsafe { driver::memset_d8_async(pointer as CUdeviceptr, byte, bytes, stream) }
                .map_err(|error| format!("filling {bytes} bytes: {error}"))
        },
        failed::noting(device.index_id),
    );
}

/// Waits until the GPU with this CUDA index has done all that this process has queued for it: CubeCL's thread first, whose
/// queue others may have left, then every stream.
///
/// # Errors
/// If one of the two has failed.
pub(crate) fn wait_for(gpu: usize) -> Result<(), String> {
    let device = cubecl::cuda::CudaDevice { index: gpu }.to_id();
    let launched = DeviceHandle::<CudaServer>::new(device).submit_blocking(|_: &mut CudaServer| ());
    launched.map_err(|error| format!("CubeCL's thread has failed: {error:?}"))?;
    synchronize(gpu).map_err(|error| error.to_string())
}

/// Makes the GPU's context current on this thread.
///
/// # Errors
/// If there is none.
pub fn enter(gpu: usize) -> Result<(), driver::DriverError> {
    // SAFETY: the context is the device's primary one, which CubeCL retains for the life of the process.
    unsafe { driver::primary_ctx::retain(gpu as i32).and_then(|context| driver::ctx::set_current(context)) }
}

fn synchronize(gpu: usize) -> Result<(), driver::DriverError> {
    enter(gpu)?;
    driver::ctx::synchronize()
}

/// Frees memory of an idle GPU that only ended threads have used: buffers of failed runs, cuBLASLt's workspaces, and the
/// pages of all of CubeCL's streams that hold nothing.
///
/// # Errors
/// If CubeCL or the driver does not.
pub(crate) fn vacate(gpu: usize) -> Result<(), String> {
    abandoned::release(gpu);
    let device = cubecl::cuda::CudaDevice { index: gpu }.to_id();
    let freed = DeviceHandle::<CudaServer>::new(device).submit_blocking(move |server: &mut CudaServer| {
        synchronize(gpu).map_err(|error| error.to_string())?;
        lt_plan::free(device);
        let mut streams = server.stream_ids().into_iter();
        streams.try_for_each(|stream| server.memory_cleanup(stream)).map_err(|error| format!("{error:?}"))
    });
    freed.map_err(|error| format!("CubeCL's thread has failed: {error:?}"))??;
    // The streams free in their order.
    synchronize(gpu).map_err(|error| error.to_string())?;
    allocator::trim(gpu);
    Ok(())
}

/// Passes all launches of this thread on to CubeCL's thread. Needed before the host waits for a device without CubeCL.
pub fn flush(tensor: &CubeTensor) {
    flush_device(tensor.client.service_id().device);
}

/// [`flush`] of a device. Burn's own waits until they are queued on the GPU and, where data was written to it meanwhile,
/// until that has arrived.
pub fn flush_device(device: DeviceId) {
    DeviceHandle::<CudaServer>::new(device).flush_queue();
}

/// The tensor with contiguous elements; CubeCL pads rows, which its `into_contiguous` ignores.
pub fn dense(x: CubeTensor) -> CubeTensor {
    let x = packed_rows(&x).unwrap_or_else(|| into_contiguous(x));
    if x.is_contiguous_buffer() { x } else { copy_contiguous(x) }
}
