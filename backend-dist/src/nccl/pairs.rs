//! Send and receive between two GPUs.
//!
//! Every ordered pair of neighbours has a communicator of its own with its own stream, so that what goes one way never
//! waits for what goes the other way, in whichever order the two ranks issue them. The compute stream waits for a
//! receive only where the tensor is used, so that one that is issued ahead runs beside the passes before. For a
//! pipeline's send it never waits: the receiver may be waiting for something that comes later on this stream. What is
//! sent is held until the host sees that it has gone.
//!
//! In a ring that would hold far too much, since the host runs layers ahead of the GPU and all that it has posted until
//! then would be held: 2 GiB a layer and backward pass for 32,768 tokens a rank of Llama 3 8B. There the compute stream
//! waits for a send some messages later ([`send_round`]), and the memory is used again behind that.
//!
//! Invariant: all members of a ring issue the same rounds in the same order, and in a round the receive of a message
//! comes on the receiver no more than two messages behind the place where it was sent on the sender. So when a rank's
//! compute stream waits for a message, it waits for a receive that stands earlier in the list of what every member
//! issues than the wait itself. A circle of waiting ranks would have to lead back to a later place: there is none.
//! (Collectives stand at the same place on all members, a ring's receive waits for a send at an earlier one, and lists
//! of stages are ordered by their schedule.)
//!
//! Whichever end comes first spins on the GPU until the other has come, so the kernels are small.

use super::library::finished;
use super::{Communicator, Held, data_type, elements, exchanged, gpu_of, own_gpus};
use crate::comm::{DeviceOp, DeviceOpKind, Group};
use crate::cuda::{dense, empty};
use crate::gpu::memory_use::ledger;
use crate::profile;
use burn::backend::Cube;
use burn::tensor::{DType, Device, Shape, Tensor};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cudarc::nccl::result as nccl;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Thread blocks of a message's kernel. Each keeps a multiprocessor from a pass while it waits for the other end; four
/// move some 80 GB/s over NVLink, which is enough beside passes of many milliseconds.
const BLOCKS: i32 = 4;

/// Messages of rings that are on their way before the compute stream waits for the oldest: keys and values, or their
/// gradients, of two sends. At least two, see the invariant.
const ON_THE_WAY: usize = 4;

/// A message of a pipeline, until its event has come.
struct Sent {
    message: Message,
    /// Until then the slot's event may still tell of an earlier message.
    is_recorded: Arc<AtomicBool>,
}

/// What is sent, and the event that will tell when it has gone.
struct Message {
    link: Arc<Communicator>,
    slot: usize,
    source: Source,
}

/// What must stay until a message has gone; counted in reports on memory.
struct Source {
    held: Held,
    gpu: usize,
    bytes: u64,
}

impl Source {
    fn new(x: CubeTensor) -> Self {
        let (gpu, bytes) = (usize::from(x.client.service_id().device.index_id), (elements(&x) * x.dtype.size()) as u64);
        ledger::add(ledger::Kind::Message, gpu, bytes);
        Self { held: Held::new(x), gpu, bytes }
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        ledger::remove(ledger::Kind::Message, self.gpu, self.bytes);
    }
}

thread_local! {
    static IN_FLIGHT: RefCell<VecDeque<Sent>> = const { RefCell::new(VecDeque::new()) };
    static IN_RINGS: RefCell<VecDeque<Message>> = const { RefCell::new(VecDeque::new()) };
}

/// Makes the communicators between neighbours of the ring `group`, if every member sits on a GPU of its own.
pub(crate) fn connect(group: &Group, device: &Device) {
    join(group, anchor(device));
}

/// [`connect`] where `like` lies; nothing if that was tried before.
pub(crate) fn connect_once(group: &Group, like: &CubeTensor) {
    let size = group.size();
    if size == 1 {
        return;
    }
    // All members made or refused their communicators in the same call.
    let ahead = group.pair(group.rank(), (group.rank() + 1) % size);
    if ahead.knows_link() {
        return;
    }
    let (client, device) = (like.client.clone(), like.device.clone());
    join(group, Some(empty_device_contiguous_dtype(client, device, Shape::from([1]), DType::F32)));
    ahead.device_link(|_| None);
}

/// `anchor` is a small tensor on the rank's GPU, if it has one.
fn join(group: &Group, anchor: Option<CubeTensor>) {
    let index = anchor.as_ref().and_then(|anchor| gpu_of(&anchor.device));
    let size = group.size();
    if size == 1 {
        return;
    }
    let (Some(index), Some(anchor)) = (own_gpus(group, index), anchor) else { return };
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
            let link = Communicator::join(&pair, index, Some(BLOCKS))
                .unwrap_or_else(|message| panic!("NCCL communicator of {pair:?}: {message}"));
            pair.device_link(|_| Some(link.clone()));
            match group.rank() == from {
                true => send(anchor.clone(), &pair, &link),
                false => drop(receive(&anchor, Shape::from([1]), anchor.dtype, &pair, &link).wait()),
            }
        }
    }
}

/// The communicator that carries tensors from one member to another, if [`connect`] has made it.
pub(crate) fn link(group: &Group, from: usize, to: usize) -> Option<(Group, Arc<Communicator>)> {
    let pair = group.pair(from, to);
    let link = pair.existing_link()?;
    Some((pair, link))
}

/// Sends `x` from the first member of `pair` to the second.
pub(crate) fn send(x: CubeTensor, pair: &Group, link: &Arc<Communicator>) {
    release();
    let is_recorded = Arc::new(AtomicBool::new(false));
    let recorded = is_recorded.clone();
    let message = start(x, pair, link, move || recorded.store(true, Ordering::Release));
    IN_FLIGHT.with_borrow_mut(|sent| sent.push_back(Sent { message, is_recorded }));
}

/// The same in a ring, in which the compute stream then waits for the message [`ON_THE_WAY`] messages earlier.
pub(crate) fn send_round(x: CubeTensor, pair: &Group, link: &Arc<Communicator>) {
    let message = start(x, pair, link, || ());
    let oldest = IN_RINGS.with_borrow_mut(|sent| {
        sent.push_back(message);
        if sent.len() > ON_THE_WAY { sent.pop_front() } else { None }
    });
    if let Some(Message { link, slot, source }) = oldest {
        let x = source.held.tensor.clone();
        pass(&link, slot, &x, source);
    }
}

/// Queues a send; `recorded` is called once the event of the message is in its stream.
fn start(x: CubeTensor, pair: &Group, link: &Arc<Communicator>, recorded: impl FnOnce() + Send + 'static) -> Message {
    let source = Source::new(dense(x));
    let x = &source.held.tensor;
    let (count, data_type) = (elements(x), data_type(x.dtype));
    let op = DeviceOp::new(DeviceOpKind::Message, x.dtype, x.meta.shape());
    let _noted = profile::operation(x, || exchanged(&op, count * x.dtype.size(), 2, ", sent"));
    let (sequence, slot) = (pair.issue(op.clone()), link.events.take());
    link.queue((sequence, op), [x], move |call, [from]| {
        call.follow()?;
        let (comm, stream) = call.target();
        // SAFETY: the buffer holds `count` elements and is held until the event has come, or something else waits for
        // it.
        finished(unsafe { nccl::send(from, count, data_type, 1, comm, stream) })?;
        call.record(slot)?;
        recorded();
        Ok(())
    });
    Message { link: link.clone(), slot, source }
}

/// A tensor on its way here. Dropping it waits for it as [`Arriving::wait`] does.
pub(crate) struct Arriving {
    in_flight: Option<(Arc<Communicator>, usize, Held)>,
}

impl Arriving {
    /// The tensor; what this thread issues from now on waits for it on the GPU.
    pub(crate) fn wait(mut self) -> CubeTensor {
        let (link, slot, buffer) = self.in_flight.take().expect("it is waited for once");
        let x = buffer.tensor.clone();
        pass(&link, slot, &x, buffer);
        x
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        match self.in_flight.take() {
            None => {}
            // The run ends. The buffer must not come back while NCCL may still write to it, so it never does.
            Some(in_flight) if std::thread::panicking() => std::mem::forget(in_flight),
            Some((link, slot, buffer)) => {
                let x = buffer.tensor.clone();
                pass(&link, slot, &x, buffer);
            }
        }
    }
}

/// Lets the compute stream wait for the message of `slot`, whose tensor is `x`; `held` is held until that is queued.
fn pass(link: &Arc<Communicator>, slot: usize, x: &CubeTensor, held: impl Send + 'static) {
    link.submit([x], move |call, _| {
        call.wait(slot)?;
        call.events().give(slot);
        drop(held);
        Ok(())
    });
}

/// Starts to receive what the first member of `pair` sends, on the second, behind what the compute stream has queued so
/// far and what the pair has exchanged before; `like` lies on the device.
pub(crate) fn receive(
    like: &CubeTensor,
    shape: Shape,
    dtype: DType,
    pair: &Group,
    link: &Arc<Communicator>,
) -> Arriving {
    release();
    let x = empty(like, shape, dtype);
    let (count, data_type) = (elements(&x), data_type(dtype));
    let op = DeviceOp::new(DeviceOpKind::Message, dtype, x.meta.shape());
    let noted = profile::operation(&x, || exchanged(&op, count * dtype.size(), 2, ", received"));
    let (sequence, slot) = (pair.issue(op.clone()), link.events.take());
    let buffer = Held::new(x.clone());
    link.queue((sequence, op), [&x], move |call, [to]| {
        // What used the buffer's memory before is done when the compute stream comes here, and nothing uses it before
        // the stream has waited for the message.
        call.follow()?;
        let (comm, stream) = call.target();
        // SAFETY: the buffer holds `count` elements and is held until the compute stream has queued its wait.
        finished(unsafe { nccl::recv(to, count, data_type, 0, comm, stream) })?;
        call.record(slot)
    });
    drop(noted);
    Arriving { in_flight: Some((link.clone(), slot, buffer)) }
}

/// A small tensor on the device, if that is CubeCL's.
pub(crate) fn anchor(device: &Device) -> Option<CubeTensor> {
    Tensor::<1>::empty([1], &device.clone().without_autodiff()).try_into_primitive::<Cube>().ok()
}

/// Lets go of what has gone.
fn release() {
    IN_FLIGHT.with_borrow_mut(|sent| {
        sent.retain(|Sent { message: Message { link, slot, .. }, is_recorded }| {
            let has_gone = is_recorded.load(Ordering::Acquire) && link.events.has_passed(*slot);
            if has_gone {
                link.events.give(*slot);
            }
            !has_gone
        });
    });
}
