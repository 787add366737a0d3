//! Send and receive between two GPUs.
//!
//! Every ordered pair of neighbours has a communicator of its own with its own stream, so that what goes one way never
//! waits for what goes the other way, in whichever order the two ranks issue them. The compute stream does not wait for a
//! send either: it would wait for the receiver, which may be waiting for something that comes later on this stream.

use super::{Communicator, elements};
use crate::comm::Group;
use crate::cuda::dense;
use burn::backend::Cube;
use burn::tensor::{DType, Device, Shape, Tensor};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cudarc::driver::{result as cuda, sys as cuda_sys};
use cudarc::nccl::result as nccl;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

/// What is being sent: freed memory could be written to before it is read, so it is held until its event has come.
struct Sent {
    event: Arc<OnceLock<usize>>,
    _source: CubeTensor,
}

thread_local! {
    static IN_FLIGHT: RefCell<VecDeque<Sent>> = const { RefCell::new(VecDeque::new()) };
}

/// Makes the communicators between neighbours of the ring `group`, if every member sits on a GPU of its own.
pub(crate) fn connect(group: &Group, device: &Device) {
    let anchor = anchor(device);
    let index = anchor.as_ref().and_then(|anchor| match &anchor.device {
        cubecl::Device::Cuda(device) => Some(device.index),
        _ => None,
    });
    let Some(mut devices) = group.all_gather_host(index).into_iter().collect::<Option<Vec<usize>>>() else { return };
    devices.sort_unstable();
    devices.dedup();
    let size = group.size();
    let (Some(anchor), Some(index)) = (anchor, index) else { return };
    if size == 1 || devices.len() < size {
        return;
    }
    // All ranks go through the pairs in the same order: setting one up, and its first message, wait for both ends.
    for from in 0..size {
        let mut targets = vec![(from + 1) % size, (from + size - 1) % size];
        targets.dedup();
        for to in targets {
            if group.rank() != from && group.rank() != to {
                continue;
            }
            let pair = group.pair(from, to);
            if pair.existing_link().is_some() {
                continue;
            }
            let link = Communicator::join(&pair, index)
                .unwrap_or_else(|message| panic!("NCCL communicator of {pair:?}: {message}"));
            pair.device_link(|_| Some(link));
            match group.rank() == from {
                true => send(anchor.clone(), &pair, link),
                false => drop(receive(&anchor, Shape::from([1]), anchor.dtype, &pair, link)),
            }
        }
    }
}

/// The communicator that carries tensors from one member to another, if [`connect`] has made it.
pub(crate) fn link(group: &Group, from: usize, to: usize) -> Option<(Group, Communicator)> {
    let pair = group.pair(from, to);
    let link = pair.existing_link()?;
    Some((pair, link))
}

/// Sends `x` from the first member of `pair` to the second.
pub(crate) fn send(x: CubeTensor, pair: &Group, link: Communicator) {
    release();
    let x = dense(x);
    let (count, kind) = (elements(&x), super::data_type(x.dtype));
    let event = Arc::new(OnceLock::new());
    let recorded = event.clone();
    link.submit(pair, [&x], move |[from], compute| {
        // SAFETY: the buffer holds `count` elements and is held until the event has come; the communicator and its
        // stream live as long as the process.
        unsafe {
            link.follow(compute)?;
            nccl::send(from, count, kind, 1, link.comm as _, link.stream as _).map_err(|error| format!("{error:?}"))?;
            let event = cuda::event::create(cuda_sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
                .map_err(|error| error.to_string())?;
            cuda::event::record(event, link.stream as _).map_err(|error| error.to_string())?;
            recorded.set(event as usize).expect("set once");
        }
        Ok(())
    });
    IN_FLIGHT.with_borrow_mut(|sent| sent.push_back(Sent { event, _source: x }));
}

/// What the first member of `pair` has sent, to the second; `like` lies on the device.
pub(crate) fn receive(like: &CubeTensor, shape: Shape, dtype: DType, pair: &Group, link: Communicator) -> CubeTensor {
    release();
    let x = empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape, dtype);
    let (count, kind) = (elements(&x), super::data_type(dtype));
    link.submit(pair, [&x], move |[to], compute| {
        // SAFETY: the buffer holds `count` elements. What used its memory before is done when the compute stream comes
        // here, and nothing uses it before the stream has waited for the message.
        unsafe {
            link.follow(compute)?;
            nccl::recv(to, count, kind, 0, link.comm as _, link.stream as _).map_err(|error| format!("{error:?}"))?;
            link.lead(compute)
        }
    });
    x
}

/// A small tensor on the device, if that is CubeCL's.
pub(crate) fn anchor(device: &Device) -> Option<CubeTensor> {
    Tensor::<1>::empty([1], &device.clone().without_autodiff()).try_into_primitive::<Cube>().ok()
}

/// Lets go of what has arrived.
fn release() {
    IN_FLIGHT.with_borrow_mut(|sent| {
        sent.retain(|message| {
            let Some(&event) = message.event.get() else { return true };
            // SAFETY: the event was created and recorded before it was set, and is destroyed once, here.
            unsafe {
                let arrived = cuda::event::query(event as _).is_ok();
                if arrived {
                    // An event that cannot be destroyed is a leak of a few bytes, no error of the run.
                    let _ = cuda::event::destroy(event as _);
                }
                !arrived
            }
        });
    });
}
