//! The NCCL transport: collectives on CubeCL's device buffers, ordered with the rank's compute stream.
//!
//! Every group has its own communicator and its own stream. An operation waits (on the device, by events) for the work
//! that the compute stream has queued, and lets the compute stream wait for it; the host never waits. The flight
//! recorder compares the operations of all members.

pub(crate) mod all_to_all;
mod communicator;
pub(crate) mod copies;
mod events;
mod join;
mod library;
mod normed_sum;
pub mod p2p;
mod work;

pub use communicator::Communicator;
pub(crate) use library::{finished, grouped};
pub(crate) use normed_sum::normed_rows;
pub use normed_sum::normed_sum;
pub(crate) use work::collective_operation;

use crate::comm::{Collective, DeviceOp, DeviceOpKind, Group, ReduceOp, Splits};
use burn::backend::Cube;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cudarc::driver::result as driver;
use cudarc::nccl::{result as nccl, sys as nccl_sys};
use gpu::cuda::{dense, empty};
use gpu::profile;
use std::ffi::c_void;
use std::sync::Arc;

pub(crate) type Outcome = Result<nccl::NcclStatus, nccl::NcclError>;

/// The communicator of `group`, on whose members `gpu` is the index of the GPU, if each has its own GPU; with `None`
/// the host transfers the data. The first call is a collective.
pub fn connect(group: &Group, gpu: Option<usize>) -> Option<Arc<Communicator>> {
    group.device_link(|group| {
        let index = own_gpus(group, gpu)?;
        let link = Communicator::join(group, index, None);
        Some(link.unwrap_or_else(|message| panic!("NCCL communicator of {group:?}: {message}")))
    })
}

/// The index of a CUDA device in this process.
pub fn gpu_of(device: &cubecl::Device) -> Option<usize> {
    match device {
        cubecl::Device::Cuda(device) => Some(device.index),
        _ => None,
    }
}

/// `index` if every member of `group` has a GPU and no two share one, across all processes; a collective. `None` if
/// ranks outside of the group share them: the thread of a GPU waits for its peers' threads in the first operation of a
/// group, and with several ranks per thread they would wait for each other in a cycle.
fn own_gpus(group: &Group, index: Option<usize>) -> Option<usize> {
    let index = index.filter(|_| !group.shares_gpus());
    let uuid = index.map(|index| {
        let uuid = driver::device::get(index as i32).and_then(driver::device::get_uuid);
        let uuid = uuid.unwrap_or_else(|error| panic!("GPU {index} of {group:?}: {error}"));
        uuid.bytes.map(|byte| byte as u8)
    });
    let mut gpus = group.all_gather_host(uuid).into_iter().collect::<Option<Vec<[u8; 16]>>>()?;
    gpus.sort_unstable();
    gpus.dedup();
    index.filter(|_| gpus.len() == group.size())
}

/// Runs `collective` on `x` over NCCL.
pub(crate) fn collective(x: CubeTensor, collective: Collective, group: &Group, link: &Arc<Communicator>) -> CubeTensor {
    let (dtype, whole) = (x.dtype, x.meta.shape().clone());
    let run = |x, kind, shape, operation| run(x, shape, group, link, DeviceOp::new(kind, dtype, &whole), operation);
    match collective {
        Collective::Identity => x,
        Collective::Slice(dim) => slice(x, dim, group),
        Collective::AllReduce(ReduceOp::Sum)
            if link.existing_one_shot().is_some_and(|one_shot| one_shot.takes(dtype, elements(&x))) =>
        {
            one_shot(x, group, link, DeviceOp::new(DeviceOpKind::AllReduce(ReduceOp::Sum), dtype, &whole))
        }
        Collective::AllReduce(op) => {
            let (count, data_type) = (elements(&x), data_type(dtype));
            run(
                x,
                DeviceOpKind::AllReduce(op),
                whole.clone(),
                Box::new(move |from, to, comm, stream| {
                    // SAFETY: both buffers hold `count` elements.
                    unsafe { nccl::all_reduce(from, to, count, data_type, reduction(op), comm, stream) }
                }),
            )
        }
        Collective::AllGather(dim) => with_first(x, dim, |x| {
            let (count, data_type) = (elements(&x), data_type(dtype));
            let shape = scaled(&x, |rows| rows * group.size());
            run(
                x,
                DeviceOpKind::AllGather(dim),
                shape,
                Box::new(move |from, to, comm, stream| {
                    // SAFETY: `to` holds `count` elements for each member.
                    unsafe { nccl::all_gather(from, to, count, data_type, comm, stream) }
                }),
            )
        }),
        Collective::ReduceScatter(dim) => with_first(x, dim, |x| {
            let size = group.size();
            let rows = x.meta.shape()[0];
            assert!(rows.is_multiple_of(size), "reduce-scatter on {group:?}: {rows} elements along dimension {dim}");
            let (count, data_type) = (elements(&x) / size, data_type(dtype));
            let shape = scaled(&x, |rows| rows / size);
            run(
                x,
                DeviceOpKind::ReduceScatter(dim),
                shape,
                Box::new(move |from, to, comm, stream| {
                    // SAFETY: `from` holds `count` elements for each member, `to` holds `count`.
                    unsafe { nccl::reduce_scatter(from, to, count, data_type, reduction(ReduceOp::Sum), comm, stream) }
                }),
            )
        }),
        Collective::Broadcast(root) => {
            let (count, data_type) = (elements(&x), data_type(dtype));
            run(
                x,
                DeviceOpKind::Broadcast(root),
                whole.clone(),
                Box::new(move |from, to, comm, stream| {
                    // SAFETY: both buffers hold `count` elements.
                    unsafe { nccl::broadcast(from, to, count, data_type, root as i32, comm, stream) }
                }),
            )
        }
        Collective::Reduce(root) => {
            let (count, data_type) = (elements(&x), data_type(dtype));
            let own = (group.rank() != root).then(|| x.clone());
            let sum = run(
                x,
                DeviceOpKind::Reduce(root),
                whole.clone(),
                Box::new(move |from, to, comm, stream| {
                    // SAFETY: both buffers hold `count` elements.
                    unsafe {
                        nccl::reduce(from, to, count, data_type, reduction(ReduceOp::Sum), root as i32, comm, stream)
                    }
                }),
            );
            own.unwrap_or(sum)
        }
        Collective::AllToAll { send, receive } => all_to_all::collective(x, &Splits { send, receive }, group, link),
    }
}

/// `operation(source, target, communicator, stream)`.
type Operation =
    Box<dyn FnOnce(*const c_void, *mut c_void, nccl_sys::ncclComm_t, nccl_sys::cudaStream_t) -> Outcome + Send>;

/// Queues `operation` from `x` to a new tensor after the compute stream's work, and the compute stream's later work
/// after it.
fn run(
    x: CubeTensor,
    shape: Shape,
    group: &Group,
    link: &Arc<Communicator>,
    op: DeviceOp,
    operation: Operation,
) -> CubeTensor {
    let x = dense(x);
    let out = empty(&x, shape, x.dtype);
    // CubeCL reuses memory in the order of the compute stream, which has queued its wait when the buffers are released.
    let noted = profile::operation(&x, || collective_operation(&op, elements(&x) * x.dtype.size(), group.size(), ""));
    let sequence = group.issue(op.clone());
    link.queue((sequence, op), [&x, &out], move |call, [from, to]| {
        call.follow()?;
        let (comm, stream) = call.target();
        finished(operation(from, to, comm, stream))?;
        call.lead()
    });
    drop(noted);
    out
}

/// The sum of a small tensor by one kernel on the compute stream.
fn one_shot(x: CubeTensor, group: &Group, link: &Arc<Communicator>, op: DeviceOp) -> CubeTensor {
    let x = dense(x);
    let (dtype, count) = (x.dtype, elements(&x));
    let out = empty(&x, x.meta.shape().clone(), dtype);
    let noted = profile::operation(&x, || collective_operation(&op, count * dtype.size(), group.size(), ", one-shot"));
    let sequence = group.issue(op.clone());
    link.queue_on(
        |call| call.compute(),
        (sequence, op),
        &[&x, &out],
        move |call, buffers| {
            let one_shot = call.one_shot().ok_or("one-shot all-reduces are not set up")?;
            one_shot.launch(call.compute(), (buffers[0], buffers[1]), dtype, count)
        },
    );
    drop(noted);
    out
}

fn slice(x: CubeTensor, dim: usize, group: &Group) -> CubeTensor {
    let length = x.meta.shape()[dim];
    let size = group.size();
    assert!(
        length.is_multiple_of(size),
        "slice on {group:?}: dimension {dim} has {length} elements, not a multiple of {size}"
    );
    let part = length / size;
    let mut ranges: Vec<burn::tensor::Slice> = x.meta.shape().iter().map(|&n| (0..n).into()).collect();
    ranges[dim] = (group.rank() * part..(group.rank() + 1) * part).into();
    Cube::float_slice(x, &ranges)
}

/// Runs `f`, which works along dimension 0, along `dim`.
fn with_first(x: CubeTensor, dim: usize, f: impl FnOnce(CubeTensor) -> CubeTensor) -> CubeTensor {
    if dim == 0 { f(x) } else { Cube::float_swap_dims(f(Cube::float_swap_dims(x, 0, dim)), 0, dim) }
}

pub(crate) fn elements(x: &CubeTensor) -> usize {
    x.meta.shape().num_elements()
}

pub(crate) fn scaled(x: &CubeTensor, rows: impl FnOnce(usize) -> usize) -> Shape {
    let mut shape = x.meta.shape().to_vec();
    shape[0] = rows(shape[0]);
    Shape::from(shape)
}

pub(crate) fn reduction(op: ReduceOp) -> nccl_sys::ncclRedOp_t {
    match op {
        ReduceOp::Sum => nccl_sys::ncclRedOp_t::ncclSum,
        ReduceOp::Max => nccl_sys::ncclRedOp_t::ncclMax,
        ReduceOp::Min => nccl_sys::ncclRedOp_t::ncclMin,
    }
}

pub(crate) fn data_type(dtype: DType) -> nccl_sys::ncclDataType_t {
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
