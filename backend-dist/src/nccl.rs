//! The NCCL transport: collectives on CubeCL's device buffers, in order with the rank's compute stream.
//!
//! Every group has its own communicator and its own stream. An operation waits (on the device, by events) for what the
//! compute stream has queued and lets the compute stream wait for it; the host never waits.

pub(crate) mod pairs;

use crate::comm::{FailureCause, Group, ReduceOp, describe};
use crate::cuda::{self, dense};
use crate::exchange::Exchange;
use burn::backend::Cube;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, Shape};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cudarc::driver::{result as driver, sys as cuda_sys};
use cudarc::nccl::{result as nccl, sys as nccl_sys};
use std::ffi::c_void;

/// One rank's end of a group's communicator. Raw handles as integers, so that they can cross to CubeCL's thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Communicator {
    comm: usize,
    stream: usize,
    inputs_ready: usize,
    done: usize,
}

impl Communicator {
    /// Joins the communicator of `group`; every member must call this, from the thread that owns GPU `device`.
    fn join(group: &Group, device: usize) -> Result<Self, String> {
        let text = |error| format!("{error:?}");
        let id = || nccl::get_uniqueid().map(|id| id.internal.to_vec()).map_err(text);
        let id = group.broadcast_host((group.rank() == 0).then(id).transpose()?, 0);
        let id = nccl_sys::ncclUniqueId { internal: id.try_into().expect("an id is an id in every process") };
        let mut comm = std::ptr::null_mut();
        // SAFETY: the context is the device's primary one, which CubeCL retains for the life of the process; `comm` is
        // written before it is read, and the id comes from member 0 of this very group.
        unsafe {
            let context = driver::primary_ctx::retain(device as i32).map_err(|error| error.to_string())?;
            driver::ctx::set_current(context).map_err(|error| error.to_string())?;
            nccl::comm_init_rank(&mut comm, group.size() as i32, id, group.rank() as i32).map_err(text)?;
        }
        let event = || {
            let event = driver::event::create(cuda_sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
            event.map(|event| event as usize).map_err(|error| error.to_string())
        };
        let stream =
            driver::stream::create(driver::stream::StreamKind::NonBlocking).map_err(|error| error.to_string())?;
        Ok(Self { comm: comm as usize, stream: stream as usize, inputs_ready: event()?, done: event()? })
    }

    /// Queues `operation(source, target, communicator, stream)` behind the compute stream and the compute stream behind it.
    fn queue(
        self,
        group: &Group,
        source: &CubeTensor,
        target: &CubeTensor,
        operation: impl FnOnce(*const c_void, *mut c_void, nccl_sys::ncclComm_t, nccl_sys::cudaStream_t) -> Outcome
        + Send
        + 'static,
    ) {
        self.submit(group, [source, target], move |[from, to], compute| {
            // SAFETY: streams, events and the communicator live as long as the process; both buffers are held until
            // the work is queued, and CubeCL reuses memory in the order of the compute stream, which waits for it.
            unsafe {
                self.follow(compute)?;
                operation(from, to, self.comm as _, self.stream as _).map_err(|error| format!("{error:?}"))?;
                self.lead(compute)
            }
        });
    }

    /// Runs `work(buffers, compute stream)` on CubeCL's thread; an error ends the run.
    fn submit<const N: usize>(
        self,
        group: &Group,
        tensors: [&CubeTensor; N],
        work: impl FnOnce([*mut c_void; N], cuda_sys::CUstream) -> Result<(), String> + Send + 'static,
    ) {
        let failed = {
            let group = group.clone();
            move |message| group.fail(FailureCause::Error(format!("NCCL on {group:?}: {message}")))
        };
        cuda::submit(tensors, work, failed);
        cuda::flush(tensors[0]);
    }

    /// Lets the communicator's stream wait for what `compute` has queued.
    ///
    /// # Safety
    /// `compute` must be a stream of the communicator's device.
    unsafe fn follow(self, compute: cuda_sys::CUstream) -> Result<(), String> {
        let wait = cuda_sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the events and the stream live as long as the process.
        unsafe {
            driver::event::record(self.inputs_ready as _, compute).map_err(|error| error.to_string())?;
            driver::stream::wait_event(self.stream as _, self.inputs_ready as _, wait)
                .map_err(|error| error.to_string())
        }
    }

    /// Lets `compute` wait for what the communicator's stream has queued.
    ///
    /// # Safety
    /// As [`follow`](Self::follow).
    unsafe fn lead(self, compute: cuda_sys::CUstream) -> Result<(), String> {
        let wait = cuda_sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: as above.
        unsafe {
            driver::event::record(self.done as _, self.stream as _).map_err(|error| error.to_string())?;
            driver::stream::wait_event(compute, self.done as _, wait).map_err(|error| error.to_string())
        }
    }
}

type Outcome = Result<nccl::NcclStatus, nccl::NcclError>;

/// The communicator of `group` if every member sits on a GPU of its own; `None` means the host has to carry the data.
pub(crate) fn communicator(group: &Group, x: &CubeTensor) -> Option<Communicator> {
    group.device_link(|group| {
        let index = match &x.device {
            cubecl::Device::Cuda(device) => Some(device.index),
            _ => None,
        };
        let mut devices = group.all_gather_host(index).into_iter().collect::<Option<Vec<usize>>>()?;
        devices.sort_unstable();
        devices.dedup();
        (devices.len() == group.size()).then(|| {
            Communicator::join(group, index.expect("every member has a GPU"))
                .unwrap_or_else(|message| panic!("NCCL communicator of {group:?}: {message}"))
        })
    })
}

/// Does `exchange` to `x` over NCCL.
pub(crate) fn exchange(x: CubeTensor, exchange: Exchange, group: &Group, link: Communicator) -> CubeTensor {
    // Nothing is queued before the hosts of all members are here: a collective on a GPU cannot be taken back, and the
    // member that it waits for may have failed, or be about to do something else. Both are known here.
    match &exchange {
        Exchange::Identity | Exchange::Slice(_) => {}
        Exchange::AllToAll { .. } => group.arrive("all-to-all".into(), format!("{:?}", x.dtype)),
        other => group.arrive(format!("{other:?}"), describe(x.dtype, x.meta.shape())),
    }
    match exchange {
        Exchange::Identity => x,
        Exchange::AllReduce(op) => {
            let (count, kind, op) = (elements(&x), data_type(x.dtype), reduction(op));
            let shape = x.meta.shape().clone();
            run(x, shape, group, link, move |from, to, comm, stream| {
                // SAFETY: both buffers hold `count` elements.
                unsafe { nccl::all_reduce(from, to, count, kind, op, comm, stream) }
            })
        }
        Exchange::AllGather(dim) => with_first(x, dim, |x| {
            let (count, kind) = (elements(&x), data_type(x.dtype));
            let shape = scaled(&x, |rows| rows * group.size());
            run(x, shape, group, link, move |from, to, comm, stream| {
                // SAFETY: `to` holds `count` elements for each member.
                unsafe { nccl::all_gather(from, to, count, kind, comm, stream) }
            })
        }),
        Exchange::ReduceScatter(dim) => with_first(x, dim, |x| {
            let size = group.size();
            let rows = x.meta.shape()[0];
            assert!(rows.is_multiple_of(size), "reduce-scatter on {group:?}: {rows} elements along dimension {dim}");
            let (count, kind) = (elements(&x) / size, data_type(x.dtype));
            let shape = scaled(&x, |rows| rows / size);
            run(x, shape, group, link, move |from, to, comm, stream| {
                // SAFETY: `from` holds `count` elements for each member, `to` holds `count`.
                unsafe { nccl::reduce_scatter(from, to, count, kind, reduction(ReduceOp::Sum), comm, stream) }
            })
        }),
        Exchange::Slice(dim) => {
            let part = x.meta.shape()[dim] / group.size();
            let mut ranges: Vec<burn::tensor::Slice> = x.meta.shape().iter().map(|&n| (0..n).into()).collect();
            ranges[dim] = (group.rank() * part..(group.rank() + 1) * part).into();
            Cube::float_slice(x, &ranges)
        }
        Exchange::Broadcast(root) => {
            let (count, kind) = (elements(&x), data_type(x.dtype));
            let shape = x.meta.shape().clone();
            run(x, shape, group, link, move |from, to, comm, stream| {
                // SAFETY: both buffers hold `count` elements.
                unsafe { nccl::broadcast(from, to, count, kind, root as i32, comm, stream) }
            })
        }
        Exchange::AllToAll { send, receive } => {
            let row = elements(&x).checked_div(x.meta.shape()[0]).unwrap_or(0);
            let (kind, width) = (data_type(x.dtype), x.dtype.size());
            let rows = receive.iter().sum();
            let shape = scaled(&x, |_| rows);
            run(x, shape, group, link, move |from, to, comm, stream| {
                let (mut sent, mut received) = (0, 0);
                nccl::group_start()?;
                for (peer, (send, receive)) in send.iter().zip(&receive).enumerate() {
                    // SAFETY: the splits add up to the rows of either buffer.
                    unsafe {
                        nccl::send(from.byte_add(sent * width), send * row, kind, peer as i32, comm, stream)?;
                        nccl::recv(to.byte_add(received * width), receive * row, kind, peer as i32, comm, stream)?;
                    }
                    sent += send * row;
                    received += receive * row;
                }
                nccl::group_end()
            })
        }
    }
}

fn run(
    x: CubeTensor,
    shape: Shape,
    group: &Group,
    link: Communicator,
    operation: impl FnOnce(*const c_void, *mut c_void, nccl_sys::ncclComm_t, nccl_sys::cudaStream_t) -> Outcome
    + Send
    + 'static,
) -> CubeTensor {
    let x = dense(x);
    let out = empty_device_contiguous_dtype(x.client.clone(), x.device.clone(), shape, x.dtype);
    link.queue(group, &x, &out, operation);
    out
}

/// Runs `f`, which works along dimension 0, along `dim`.
fn with_first(x: CubeTensor, dim: usize, f: impl FnOnce(CubeTensor) -> CubeTensor) -> CubeTensor {
    if dim == 0 { f(x) } else { Cube::float_swap_dims(f(Cube::float_swap_dims(x, 0, dim)), 0, dim) }
}

fn elements(x: &CubeTensor) -> usize {
    x.meta.shape().num_elements()
}

fn scaled(x: &CubeTensor, rows: impl FnOnce(usize) -> usize) -> Shape {
    let mut shape = x.meta.shape().to_vec();
    shape[0] = rows(shape[0]);
    Shape::from(shape)
}

fn reduction(op: ReduceOp) -> nccl_sys::ncclRedOp_t {
    match op {
        ReduceOp::Sum => nccl_sys::ncclRedOp_t::ncclSum,
        ReduceOp::Max => nccl_sys::ncclRedOp_t::ncclMax,
        ReduceOp::Min => nccl_sys::ncclRedOp_t::ncclMin,
    }
}

fn data_type(dtype: DType) -> nccl_sys::ncclDataType_t {
    use nccl_sys::ncclDataType_t as Kind;
    match dtype {
        DType::F64 => Kind::ncclFloat64,
        DType::F32 | DType::Flex32 => Kind::ncclFloat32,
        DType::F16 => Kind::ncclFloat16,
        DType::BF16 => Kind::ncclBfloat16,
        DType::I64 => Kind::ncclInt64,
        DType::I32 => Kind::ncclInt32,
        DType::U64 => Kind::ncclUint64,
        DType::U32 => Kind::ncclUint32,
        DType::I8 => Kind::ncclInt8,
        DType::U8 => Kind::ncclUint8,
        other => panic!("NCCL has no element type for {other:?}; it has floats and integers of 1 to 8 bytes"),
    }
}
