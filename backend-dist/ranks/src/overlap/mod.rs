//! Collectives that overlap the rank's computation: into flat device buffers, on the group's own stream.
//!
//! An operation begins after the queued work of the compute stream, which does not wait for it before
//! [`Pending::wait`]. The host never waits.

#[doc(hidden)]
pub mod all_to_all;
#[doc(hidden)]
pub mod chunks;
#[doc(hidden)]
pub mod dma;
#[doc(hidden)]
pub mod together;

use crate::comm::{DeviceOp, DeviceOpKind, Group, ReduceOp};
use crate::in_place::is_in_place_or_apart;
use crate::nccl::{
    Communicator, Outcome, collective_operation, connect, data_type, elements, finished, gpu_of, reduction,
};
use burn::backend::Cube;
use burn::tensor::{Device, Tensor};
use burn_cubecl::tensor::CubeTensor;
use cudarc::driver::result as driver;
use cudarc::nccl::result as nccl;
use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclRedOp_t};
use gpu::cuda::{self, PinnedBuffer};
use gpu::profile::{self, Operation};
use std::ffi::c_void;
use std::sync::Arc;

/// A collective in flight. Until it is waited for, its buffers must not be written, and its target must not be read.
///
/// Dropping it waits for it. It belongs to the thread that started it.
#[must_use = "dropping it makes the compute stream wait at once"]
pub struct Pending {
    /// `None` for a group of one: the operation is on the compute stream.
    in_flight: Option<InFlight>,
}

/// Invariant: the buffers are held until the compute stream has queued its wait.
struct InFlight {
    link: Arc<Communicator>,
    slot: usize,
    /// At least one.
    buffers: Vec<PinnedBuffer>,
}

impl Pending {
    /// Makes the compute stream wait for the collective; the host does not wait.
    pub fn wait(self) {
        drop(self);
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let Some(InFlight { link, slot, buffers }) = self.in_flight.take() else { return };
        if std::thread::panicking() {
            // The run ends. The buffers must not be freed while NCCL may still use them, so they are abandoned.
            return buffers.into_iter().for_each(PinnedBuffer::abandon);
        }
        let near = buffers[0].tensor.clone();
        let _noted = profile::operation(&near, || Operation::collective("wait for overlapped communication", 0));
        link.clone().submit([&near], move |call, _| {
            call.wait(slot)?;
            link.events.give(slot);
            drop(buffers);
            Ok(())
        });
    }
}

/// Whether every member of `group` has its own GPU, so that these operations can run. The first call is a collective,
/// which connects the members.
///
/// # Panics
/// If NCCL is missing or refuses.
pub fn has_device_link(group: &Group, device: &Device) -> bool {
    let anchor = Tensor::<1>::empty([1], &device.clone().without_autodiff());
    // The devices of a logical device's ranks have links, and the device itself has none.
    #[cfg(feature = "group")]
    if anchor.clone().try_into_primitive::<burn::backend::Group>().is_ok() {
        return false;
    }
    let anchor = anchor.try_into_primitive::<Cube>();
    let gpu = anchor.ok().and_then(|anchor| gpu_of(&anchor.device));
    match group.size() {
        1 => gpu.is_some(),
        _ => connect(group, gpu).is_some(),
    }
}

/// Replaces every member's `buffer` by the sum over all members.
///
/// # Panics
/// Unless the buffer is contiguous on a GPU and [`has_device_link`].
pub fn all_reduce_in_place(buffer: &Tensor<1>, group: &Group) -> Pending {
    let (buffer, kind) = (flat(buffer, "all-reduce", group), DeviceOpKind::AllReduce(ReduceOp::Sum));
    let (count, data_type, op) = (elements(&buffer), data_type(buffer.dtype), reduction(ReduceOp::Sum));
    let operation = move |[from, to]: [*mut c_void; 2], comm, stream| {
        // SAFETY: the buffer holds `count` elements, and NCCL allows source and target to be the same.
        unsafe { nccl::all_reduce(from, to, count, data_type, op, comm, stream) }
    };
    begin(kind, [buffer.clone(), buffer], [count, count], group, operation)
}

/// Writes shard `rank` of the sum of all members' `source`s to `target`; the shards are equal. The target may be that
/// shard of the source.
///
/// # Panics
/// Unless both are contiguous, of one type and on a GPU, the source has as many shards of the target's length as the
/// group has members, and [`has_device_link`]. The run fails if they overlap in any other way.
pub fn reduce_scatter_into(source: &Tensor<1>, target: &Tensor<1>, group: &Group) -> Pending {
    let buffers = [source, target].map(|buffer| flat(buffer, "reduce-scatter", group));
    let (count, data_type, op) = (elements(&buffers[1]), data_type(buffers[1].dtype), reduction(ReduceOp::Sum));
    assert!(
        elements(&buffers[0]) == count * group.size() && buffers[0].dtype == buffers[1].dtype,
        "reduce-scatter on {group:?}: {} elements of {:?} do not make {} parts of {count} of {:?}",
        elements(&buffers[0]),
        buffers[0].dtype,
        group.size(),
        buffers[1].dtype
    );
    let operation = move |[from, to]: [*mut c_void; 2], comm, stream| {
        // SAFETY: `from` holds `count` elements for each member, `to` holds `count`; `begin` has checked their overlap.
        unsafe { nccl::reduce_scatter(from, to, count, data_type, op, comm, stream) }
    };
    begin(DeviceOpKind::ReduceScatter(0), buffers, [group.size() * count, count], group, operation)
}

/// Writes all members' `source`s to `target`, in group order. The source may be shard `rank` of the target.
///
/// # Panics
/// Unless both are contiguous, of one type and on a GPU, the target has as many shards of the source's length as the
/// group has members, and [`has_device_link`]. The run fails if they overlap in any other way.
pub fn all_gather_into(source: &Tensor<1>, target: &Tensor<1>, group: &Group) -> Pending {
    let buffers = [source, target].map(|buffer| flat(buffer, "all-gather", group));
    let (count, data_type) = (elements(&buffers[0]), data_type(buffers[0].dtype));
    assert!(
        elements(&buffers[1]) == count * group.size() && buffers[0].dtype == buffers[1].dtype,
        "all-gather on {group:?}: {} parts of {count} elements of {:?} do not make {} of {:?}",
        group.size(),
        buffers[0].dtype,
        elements(&buffers[1]),
        buffers[1].dtype
    );
    let operation = move |[from, to]: [*mut c_void; 2], comm, stream| {
        // SAFETY: `from` holds `count` elements, `to` holds `count` for each member; `begin` has checked their overlap.
        unsafe { nccl::all_gather(from, to, count, data_type, comm, stream) }
    };
    begin(DeviceOpKind::AllGather(0), buffers, [count, group.size() * count], group, operation)
}

/// Replaces every member's `buffer` by that of member `root`.
///
/// # Panics
/// Unless the buffer is contiguous on a GPU and [`has_device_link`].
pub fn broadcast_in_place(buffer: &Tensor<1>, root: usize, group: &Group) -> Pending {
    let buffer = flat(buffer, "broadcast", group);
    let (count, data_type) = (elements(&buffer), data_type(buffer.dtype));
    let operation = move |[from, to]: [*mut c_void; 2], comm, stream| {
        // SAFETY: the buffer holds `count` elements, and NCCL allows source and target to be the same.
        unsafe { nccl::broadcast(from, to, count, data_type, root as i32, comm, stream) }
    };
    begin(DeviceOpKind::Broadcast(root), [buffer.clone(), buffer], [count, count], group, operation)
}

/// Writes the mean of all members' `source`s to the `target` of member `root`; other members' targets are not written.
/// The target may be the source.
///
/// # Panics
/// Unless both are contiguous, of one type and length and on a GPU, and [`has_device_link`].
pub fn reduce_mean_into(source: &Tensor<1>, target: &Tensor<1>, root: usize, group: &Group) -> Pending {
    let buffers = [source, target].map(|buffer| flat(buffer, "reduce", group));
    let (count, data_type) = (elements(&buffers[0]), data_type(buffers[0].dtype));
    assert!(
        elements(&buffers[1]) == count && buffers[0].dtype == buffers[1].dtype,
        "reduce on {group:?}: a source of {count} elements of {:?} and a target of {} of {:?}",
        buffers[0].dtype,
        elements(&buffers[1]),
        buffers[1].dtype
    );
    let operation = move |[from, to]: [*mut c_void; 2], comm, stream| {
        // SAFETY: both buffers hold `count` elements.
        unsafe { nccl::reduce(from, to, count, data_type, ncclRedOp_t::ncclAvg, root as i32, comm, stream) }
    };
    begin(DeviceOpKind::Reduce(root), buffers, [count, count], group, operation)
}

/// [`begin_chunk`] of the whole source.
fn begin(
    kind: DeviceOpKind,
    buffers: [CubeTensor; 2],
    lengths: [usize; 2],
    group: &Group,
    operation: impl FnOnce([*mut c_void; 2], ncclComm_t, cudaStream_t) -> Outcome + Send + 'static,
) -> Pending {
    let shape = buffers[0].meta.shape().clone();
    begin_chunk(kind, &shape, buffers, lengths, group, operation)
}

/// Queues `operation(source and target, communicator, stream)` after the queued work of the compute stream. The
/// operation is on a tensor of `shape` somewhere in the buffers, which have `lengths` elements.
fn begin_chunk(
    kind: DeviceOpKind,
    shape: &[usize],
    buffers: [CubeTensor; 2],
    lengths: [usize; 2],
    group: &Group,
    operation: impl FnOnce([*mut c_void; 2], ncclComm_t, cudaStream_t) -> Outcome + Send + 'static,
) -> Pending {
    let [source, target] = &buffers;
    let bytes = lengths.map(|length| length * source.dtype.size());
    if group.size() == 1 {
        copy(source, target, bytes[0]);
        return Pending { in_flight: None };
    }
    let link = connect(group, gpu_of(&source.device))
        .unwrap_or_else(|| panic!("{group:?} has members that share a GPU or have none: ask `has_device_link` first"));
    let op = DeviceOp::new(kind, source.dtype, shape);
    let noted = profile::operation(source, || {
        let bytes = shape.iter().product::<usize>() * source.dtype.size();
        collective_operation(&op, bytes, group.size(), ", overlapped")
    });
    let sequence = group.issue(op.clone());
    let (slot, rank) = (link.events.take(), group.rank());
    let held = buffers.clone().map(PinnedBuffer::new);
    link.queue((sequence, op), [source, target], move |call, pointers| {
        let [source, target] = [0, 1].map(|i| (pointers[i] as usize, bytes[i]));
        if !is_in_place_or_apart(source, target, rank) {
            return Err(format!("source and target overlap, and not at part {rank}: {source:?} and {target:?} bytes"));
        }
        call.follow()?;
        let (comm, stream) = call.target();
        finished(operation(pointers, comm, stream))?;
        call.record(slot)
    });
    drop(noted);
    Pending { in_flight: Some(InFlight { link, slot, buffers: held.into() }) }
}

/// A group of one only copies its source, on the compute stream.
fn copy(source: &CubeTensor, target: &CubeTensor, bytes: usize) {
    let copy = move |[from, to]: [*mut c_void; 2], compute| match from == to {
        true => Ok(()),
        // SAFETY: both buffers hold `bytes` bytes and are held until the copy is queued.
        false => unsafe { driver::memcpy_dtod_async(to as u64, from as u64, bytes, compute) }
            .map_err(|error| error.to_string()),
    };
    cuda::submit([source, target], copy, |message| panic!("copy between device buffers: {message}"));
}

/// The buffer's primitive.
fn flat(buffer: &Tensor<1>, operation: &str, group: &Group) -> CubeTensor {
    let Ok(buffer) = buffer.clone().without_autodiff().try_into_primitive::<Cube>() else {
        panic!("{operation} on {group:?}: the buffer is not on a GPU");
    };
    assert!(
        buffer.is_contiguous_buffer(),
        "{operation} on {group:?}: the buffer is no run of elements: shape {:?}, strides {:?}",
        buffer.meta.shape(),
        buffer.meta.strides()
    );
    buffer
}
